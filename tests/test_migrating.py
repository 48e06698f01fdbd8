"""The pages for users of other libraries: each name that those teach is there, and what is told
of the names that have no counterpart holds. (The jobs in test_jobs.py run the rest.)"""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch
from harness import run_threads
from harness.graphs import hetero, mixed
from harness.parts import Cutter

import sar
from sar.comm import Group
from sar.partition.arrays import GraphArrays
from sar.partition.load import load_partition
from sar.sampling import LinkNeighborLoader, NeighborLoader

DOCS = Path(__file__).resolve().parent.parent / "docs"
# What readmes, tutorials and examples of the libraries call, pass and read, beside torch's names.
PYG = """
DistContext DistLinkNeighborLoader DistNeighborLoader DistNeighborSampler DistributedDataParallel
LocalFeatureStore LocalGraphStore Partitioner async_sampling batch_size concurrency current_ctx
destroy_process_group device disjoint drop_last edge_label edge_label_index edge_label_time
enable_multithreading filter_per_worker from_partition generate_partition global_rank
global_world_size group_name init_process_group input_nodes labels lookup_features master_addr
master_port meta n_id neg_sampling num_neighbors num_rpc_threads num_sampled_nodes num_workers
persistent_workers put_tensor rank recursive temporal_strategy time_attr transform trim_to_layer
worker_init_fn world_size
"""
GLT = """
CollocatedDistSamplingWorkerOptions ConcurrentEventLoop Dataset DeviceGroup DistContext DistDataset
DistLinkNeighborLoader DistNeighborLoader DistNeighborSampler DistSubGraphLoader
DistributedDataParallel Feature FrequencyPartitioner Graph HeteroSamplerOutput Join
LinkNeighborLoader MpDistSamplingWorkerOptions NegativeSampling NeighborLoader NeighborSampler
NodeSamplerInput PartitionerBase RDMA RandomNegativeSampler RandomPartitioner
RemoteDistSamplingWorkerOptions SamplerOutput Split.train Topology UnifiedTensor ZERO_COPY
as_pyg_v1 batch build buffer_size cache_ratio channel_size chunk_size client_group_name
client_rank collect_features device_group_list drop_last edge edge_assign_strategy edge_dir
edge_feat edge_ids edge_index feature_data feature_dir get_context get_edge_types global_rank
global_world_size graph_dir graph_mode group_name id2index init_client init_from init_graph
init_node_features init_node_labels init_rpc init_server init_worker_group input_layout
input_nodes label label_file layout load master_addr master_port node node_feat num_clients
num_neighbors num_partitions num_rpc_threads num_servers num_workers output_dir partition
partition_idx pin_memory prefetch_size probs random_seed request_server role sample_from_nodes
sample_prob server_group_name server_rank shuffle shutdown_client sort_by_in_degree sort_func
split_ratio strategy to_device wait_and_shutdown_server whole_node_label_file with_edge with_gpu
with_neg with_weight worker_concurrency worker_devices worker_key worker_name worker_options
world_size
"""
SAR = """
Config.disable_sr Config.max_collective_size DataLoader DistNeighborSampler DistributedBN1D
DistributedBlock GraphShard GraphShardManager GraphShardManager.get_full_partition_graph
GraphShardManager.sampling_graph HeteroGraphShardManager comm.all_reduce comm.rank
common_tuples.PartitionData common_tuples.ShardEdgesAndFeatures construct_full_graph
construct_mfgs convert_dist_graph core.GraphShardManager core.message_has_parameters
core.sampling.DataLoader core.sampling.DistNeighborSampler edge_softmax gather_grads
initialize_comms load_dgl_partition_data logging_setup message_has_parameters nfs_ip_init patch_dgl
rank suffix_key_lookup sync_params world_size
"""


def listed(page: str, title: str) -> set[str]:
    """The names in the left column of a section's table."""
    section = (DOCS / page).read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"[\w.]+\w", " ".join(re.findall(r"^\| (.*?) \|", section, re.M))))
    return words | {part for word in words for part in word.split(".")}


@pytest.mark.parametrize(
    ("title", "names"),
    [("From torch_geometric.distributed", PYG), ("From GraphLearn-for-PyTorch", GLT)],
)
def test_tables_have_every_name(title: str, names: str) -> None:
    assert set(names.split()) - listed("migrating.md", title) == set()


def test_names_of_the_original_are_there() -> None:
    for name in set(SAR.split()) - {"GraphShard"}:  # of the internals
        operator.attrgetter(name)(sar)


# ---------------------------------------------------------------- what the pages say of names


@pytest.mark.parametrize("size", [1, 3])
def test_rows_by_id(size: int, partitioned: Cutter) -> None:
    """In place of ``lookup_features``: any rank's nodes, also twice, in the order of the ids."""
    graph = mixed()

    def case(group: Group, path: str) -> None:
        data = load_partition(path, group.rank)
        ids = torch.tensor([50, 3, 3, 0, 56, 20])[: 6 - 3 * group.rank]  # none on rank 2
        pairs = torch.stack([ids, ids])
        options = {"original_ids": True, "as_": "pyg", "batch_size": 4}
        with LinkNeighborLoader(data, [0], pairs, **options) as loader:
            rows = torch.cat([batch.x[batch.edge_label_index[0]] for batch in loader])
        assert torch.equal(rows, graph.node_data["_N"]["feat"][ids])

    run_threads(size, case, partitioned(graph, size))


def test_rows_by_id_of_one_type(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        data, ids = load_partition(path, group.rank), torch.tensor([4, 30, group.rank])
        etype = "user", "buys", "item"
        given = etype, torch.stack([ids, torch.zeros_like(ids)])
        with LinkNeighborLoader(data, [0], given, original_ids=True, as_="pyg") as loader:
            rows = [batch["user"].x[batch[etype].edge_label_index[0]] for batch in loader]
        assert torch.equal(torch.cat(rows), hetero().node_data["user"]["feat"][ids])

    run_threads(2, case, partitioned(hetero(), 2))


def test_one_machine(tmp_path: Path) -> None:
    """PyG's data is one part; a loader in one process, with the edges' ids as they were."""
    from torch_geometric.data import Data

    graph: GraphArrays = mixed()
    index, x = torch.stack(graph.edges["_N", "_E", "_N"]), graph.node_data["_N"]["feat"]
    given = Data(x=x, y=graph.node_data["_N"]["label"], edge_index=index)
    data = sar.load_partition_data(sar.partition_graph(given, tmp_path / "parts", 1))
    with NeighborLoader(data, [3, 2], torch.arange(9), original_ids=True, as_="pyg") as loader:
        for batch in loader:
            assert torch.equal(batch.n_id[batch.edge_index], index[:, batch.e_id])
            assert torch.equal(batch.x, x[batch.n_id])
