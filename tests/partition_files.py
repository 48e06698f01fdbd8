"""Writers of DGL's binary files for tests: any layout, also ones that DGL would not write."""

import struct

import numpy as np
import torch

CODES = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
}  # fmt: skip
NONE = torch.zeros(0, dtype=torch.int64)


def u64(*values):
    return struct.pack(f"<{len(values)}Q", *values)


def text(value):
    raw = value.encode()
    return u64(len(raw)) + raw


def array(tensor, *, shape=None, nbytes=None, code=None, lanes=1, magic=0xDD5E40F096B4A13F):
    """An NDArray; keywords replace fields of its header."""
    raw = b""
    if tensor.numel():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    shape = tuple(tensor.shape) if shape is None else shape
    kind, bits = code or CODES[tensor.dtype]
    header = u64(magic, 0) + struct.pack("<iiiBBH", 1, 0, len(shape), kind, bits, lanes)
    sizes = struct.pack(f"<{len(shape)}q", *shape)
    return header + sizes + struct.pack("<q", len(raw) if nbytes is None else nbytes) + raw


def named(tensors):
    return u64(len(tensors)) + b"".join(text(name) + array(one) for name, one in tensors.items())


def tensor_dict(tensors, count=None):
    return u64(0xDD5A9FBE3FA2443F, len(tensors) if count is None else count) + named(tensors)


def csr(rows, columns, pointers, indices, ids=NONE):
    arrays = array(pointers) + array(indices) + array(ids)
    return u64(0xDD6CD31205DFF127) + struct.pack("<2q", columns, rows) + arrays + b"\0"


def coo(nodes, src, dst, ids=NONE):
    size = struct.pack("<2q", nodes, nodes)
    return u64(0xDD61FFD305DFF127) + size + array(src) + array(dst) + array(ids) + b"\0\0"


def metagraph():
    one = torch.zeros(1, dtype=torch.int64)
    return u64(0xDD3C5FFE20046ABF) + csr(1, 1, torch.tensor([0, 1]), one, one)


def compress(major, minor, nodes):
    """(pointers, indices, edge ids) of edges grouped by ``major``."""
    order = torch.argsort(major, stable=True)
    counts = torch.bincount(major, minlength=nodes)
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return pointers.to(major.dtype), minor[order], order.to(major.dtype)


def matrix(layout, nodes, src, dst):
    if layout == "coo":
        return coo(nodes, src, dst)
    ends = (src, dst) if layout == "csr" else (dst, src)
    return csr(nodes, nodes, *compress(*ends, nodes))


def graph(nodes, src, dst, node_data, edge_data, layouts=("coo",), old=False, matrices=None):
    """A ``graph.dgl`` file of one homogeneous graph.

    ``old`` writes the one-number format code of early files; ``matrices`` replaces the bytes of the
    stored matrices.
    """
    bits = {"coo": 1, "csr": 2, "csc": 4}
    code, allowed = sum(bits[one] for one in layouts) | 1 << 32, 7 | 1 << 32
    if old:
        code, allowed = {"coo": 1, "csr": 2, "csc": 3}[layouts[0]], 0
    if matrices is None:
        matrices = [matrix(one, nodes, src, dst) for one in layouts]
    body = u64(0xDD589FBE35224ABF) + metagraph() + u64(1)
    body += u64(0xDD2E60F0F6B4A127, code, allowed) + b"".join(metagraph() + one for one in matrices)
    body += u64(1, nodes) + u64(1) + named(node_data) + u64(1) + named(edge_data)
    body += u64(1) + text("_N") + u64(1) + text("_E")
    header = u64(0xDD2E4FF046B4A13F, 2, 2, 1).ljust(4096, b"\0")
    trailer = u64(16) + u64(1, 4112) + u64(16)
    return header + u64(4112) + u64(0) + body + trailer


def part_of(loaded):
    """``(nodes, src, dst, node data, edge data)`` of a DGL graph, as `graph` takes them."""
    src, dst = loaded.edges()
    return loaded.num_nodes(), src, dst, dict(loaded.ndata), dict(loaded.edata)


def mutate(raw, edits):
    """A copy of ``raw`` with ``(position, byte)`` edits applied; positions wrap around."""
    changed = np.frombuffer(raw, np.uint8).copy()
    for at, value in edits:
        changed[at % len(changed)] = value
    return changed.tobytes()


def random_graph(nodes, edges, **options):
    """A DGL graph with multi-edges and loops; `dgl.rand_graph` has a generator of its own."""
    import dgl

    rng = torch.Generator().manual_seed(0)
    return dgl.graph(
        tuple(torch.randint(nodes, (2, edges), generator=rng)), num_nodes=nodes, **options
    )
