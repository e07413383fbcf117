"""The GPUs that kernels are compiled for, as one table: what a kernel may use, and what the prediction is made of.

Where a number is public its source is in `Gpu.sources`; the rest are assumptions, named in `ASSUMED`. A
multiprocessor is NVIDIA's SM or AMD's CU, a program one Triton program (thread block, workgroup).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "ASSUMED", "GPUS", "Gpu", "get", "of_architecture"]

ASSUMED = ("read_share", "l2_bandwidth", "latency", "launch_gap")
"""The columns that are no public figure of the chip's maker: what a streaming kernel reaches of the memory's
bandwidth, bytes per second from the last cache before memory, seconds of a load that misses every cache, seconds
between two kernels of a CUDA graph. No prediction is better than these."""


@dataclass(frozen=True)
class Gpu:
    """One row. Sizes in bytes, bandwidths in bytes per second, times in seconds, registers of 32 bits.

    `registers` are a multiprocessor's, `registers_per_thread` the most a thread may have, `register_step` the steps in
    which a thread's registers are allocated; `shared` a multiprocessor's shared memory, `shared_per_program` the most
    a program may have, `shared_reserved` what the system keeps of every program's; `warps` and `programs` the most
    that a multiprocessor holds.
    """

    name: str
    title: str
    arch: str
    warp_size: int
    multiprocessors: int
    memory_bandwidth: float
    registers: int
    registers_per_thread: int
    register_step: int
    shared: int
    shared_per_program: int
    shared_reserved: int
    warps: int
    programs: int
    read_share: float
    l2_bandwidth: float
    latency: float
    launch_gap: float
    sources: str

    @property
    def backend(self) -> str:
        """Triton's name for the maker."""
        return "hip" if self.arch.startswith("gfx") else "cuda"

    @property
    def target(self) -> int | str:
        """The architecture as Triton wants it: 90, "gfx942"."""
        return self.arch if self.backend == "hip" else int(self.arch.removeprefix("sm_"))

    def resident(self, registers: int, shared: int, num_warps: int) -> int:
        """How many programs a multiprocessor holds at once; 0: not even one."""
        if registers > self.registers_per_thread or shared > self.shared_per_program:
            return 0
        step = self.register_step
        allocated = max(1, -(-registers // step)) * step
        if (
            self.backend == "hip"
        ):  # registers belong to one of four SIMD units, and a program's warps are spread over them
            per_simd = min(self.warps // 4, 512 // allocated)
            by_registers = 4 * per_simd // num_warps if num_warps % 4 == 0 else per_simd // -(-num_warps // 4)
        else:
            by_registers = self.registers // (allocated * self.warp_size * num_warps)
        by_shared = self.shared // (shared + self.shared_reserved) if shared else self.programs
        return min(self.programs, self.warps // num_warps, by_registers, by_shared)


_CUDA = {
    "warp_size": 32,
    "registers": 65536,
    "registers_per_thread": 255,
    "register_step": 8,
    "shared_reserved": 1024,
    "warps": 64,
    "programs": 32,
}
_CUDA_LIMITS = "limits: CUDA C++ Programming Guide, technical specifications per compute capability"

GPUS = (
    Gpu(
        "a100", "A100 SXM 80 GB", "sm_80", multiprocessors=108, memory_bandwidth=2.039e12,
        shared=164 * 1024, shared_per_program=163 * 1024, **_CUDA,
        read_share=0.90, l2_bandwidth=4.5e12, latency=0.6e-6, launch_gap=1.3e-6,
        sources="NVIDIA A100 80GB datasheet (2,039 GB/s); NVIDIA A100 architecture whitepaper (108 SMs); "
        + _CUDA_LIMITS,
    ),
    Gpu(
        "h100", "H100 SXM 80 GB", "sm_90", multiprocessors=132, memory_bandwidth=3.35e12,
        shared=228 * 1024, shared_per_program=227 * 1024, **_CUDA,
        read_share=0.90, l2_bandwidth=5.7e12, latency=0.7e-6, launch_gap=1.2e-6,
        sources="NVIDIA H100 datasheet (3.35 TB/s); NVIDIA H100 architecture whitepaper (132 SMs); "
        + _CUDA_LIMITS,
    ),
    Gpu(
        "h200", "H200 SXM 141 GB", "sm_90", multiprocessors=132, memory_bandwidth=4.8e12,
        shared=228 * 1024, shared_per_program=227 * 1024, **_CUDA,
        read_share=0.90, l2_bandwidth=5.7e12, latency=0.7e-6, launch_gap=1.2e-6,
        sources="NVIDIA H200 datasheet (4.8 TB/s); the chip of the H100 otherwise; " + _CUDA_LIMITS,
    ),
    Gpu(
        "b200", "B200 SXM 180 GB", "sm_100", multiprocessors=148, memory_bandwidth=8.0e12,
        shared=228 * 1024, shared_per_program=227 * 1024, **_CUDA,
        read_share=0.90, l2_bandwidth=10e12, latency=0.8e-6, launch_gap=1.2e-6,
        sources="NVIDIA DGX B200 datasheet (8 TB/s a GPU); Chips and Cheese, Nvidia's B200 (148 SMs); " + _CUDA_LIMITS,
    ),
    Gpu(
        "mi300x", "Instinct MI300X", "gfx942", multiprocessors=304, memory_bandwidth=5.3e12,
        shared=64 * 1024, shared_per_program=64 * 1024, warp_size=64, registers=4 * 512 * 64,
        registers_per_thread=512, register_step=8, shared_reserved=0, warps=32, programs=16,
        read_share=0.80, l2_bandwidth=17e12, latency=0.8e-6, launch_gap=3e-6,
        sources="AMD Instinct MI300X data sheet (5.3 TB/s, 304 CUs, Infinity Cache at up to 17.2 TB/s); AMD CDNA 3 ISA "
        "(64 KB LDS, 512 VGPRs a lane)",
    ),
)  # fmt: skip
"""Every GPU."""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What every kernel must compile to."""


def get(name: str) -> Gpu:
    """The GPU called `name`; ValueError naming the known ones otherwise."""
    for gpu in GPUS:
        if gpu.name == name:
            return gpu
    raise ValueError(f"gpu is {name!r}, expected one of: {', '.join(gpu.name for gpu in GPUS)}")


def of_architecture(arch: str) -> Gpu:
    """A GPU of that architecture; their limits are the same."""
    for gpu in GPUS:
        if gpu.arch == arch:
            return gpu
    raise ValueError(f"arch is {arch!r}, expected one of: {', '.join(ARCHITECTURES)}")
