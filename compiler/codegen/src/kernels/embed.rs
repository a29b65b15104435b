use super::KernelSource;
use model::kernel::Kernel;
use model::target::CpuClass;

pub fn source(_kernel: &Kernel, _cpu: CpuClass) -> KernelSource {
    KernelSource { linalg: String::new(), strategy: String::new() }
}
