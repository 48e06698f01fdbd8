"""Packaging of sar, called sar-gnn in a registry: what is installed and what it needs."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def requirements() -> list[str]:
    """The lines of requirements.txt without comments: one list for pip -r and for the package."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


# `sar bench` runs the package of measurements, which has no name of its own once installed.
BENCH = find_packages(include=["benchmarks", "benchmarks.*"])

# Wheels of its allocator exist for this platform only.
TBB = "tbb>=2021.11,<2024; sys_platform == 'linux' and platform_machine == 'x86_64'"
COMPLETION = "shtab>=1.7,<2"
PLOT = ["matplotlib>=3.8", "jinja2>=3"]

setup(
    name="sar-gnn",  # what imports as sar: another package has that name
    version="0.1.0",
    description="Exact full-batch training of DGL models over many hosts, in linear memory",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="the sar authors",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["sar", "sar.*"]) + [f"sar._bench.{name}" for name in BENCH],
    package_dir={f"sar._bench.{name}": name.replace(".", "/") for name in BENCH},
    package_data={"sar": ["py.typed", "pictures/*.html"], "sar._bench.benchmarks": ["*.sh"]},
    install_requires=requirements(),
    extras_require={
        "plot": PLOT,
        "data": ["ogb==1.3.6"],
        "loggers": ["tensorboard>=2.15,<3", "wandb>=0.17,<1"],
        "tbb": [TBB],
        "pyg": ["torch_geometric>=2.6"],
        "completion": [COMPLETION],
        "test": [
            TBB,
            COMPLETION,
            *PLOT,
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "torch_geometric>=2.6",
        ],
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=1,<2",
            "django-static-mathjax>=3.2,<4",
            "selenium>=4.20,<5",
        ],
        "lint": ["ruff>=0.15,<0.18", "mypy>=2,<3"],
    },
    # sysstat has a program `sar`, too: where it comes first on the path, the second name is there.
    entry_points={
        "console_scripts": ["sar = sar.__main__:main", "sar-gnn = sar.__main__:main"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
