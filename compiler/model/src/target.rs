//! Targets: what code is generated for and what a bundle asks of the machine that runs it.

/// A CPU class, a GPU's chip, or its emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Cpu(CpuClass),
    Cuda(Chip),
    /// Device kernels, run on the CPU by the emulator.
    Emulated,
}

/// The name of [`Target::Emulated`].
const EMULATED: &str = "cuda-emulated";

impl From<CpuClass> for Target {
    fn from(cpu: CpuClass) -> Self {
        Target::Cpu(cpu)
    }
}

impl From<Chip> for Target {
    fn from(chip: Chip) -> Self {
        Target::Cuda(chip)
    }
}

impl Target {
    /// The name in `--target` and in the manifest: a CPU class, `cuda:` and a chip, or `cuda-emulated`.
    pub fn name(self) -> String {
        match self {
            Target::Cpu(cpu) => cpu.name().into(),
            Target::Cuda(chip) => format!("cuda:{}", chip.name()),
            Target::Emulated => EMULATED.into(),
        }
    }

    pub fn from_name(name: &str) -> Option<Target> {
        match name.strip_prefix("cuda:") {
            Some(chip) => Chip::from_name(chip).map(Target::Cuda),
            None if name == EMULATED => Some(Target::Emulated),
            None => CpuClass::from_name(name).map(Target::Cpu),
        }
    }
}

/// A GPU's architecture. Device code for one runs on it and on later ones of the same name family, but for `sm_90a`, which runs there only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chip {
    Sm80,
    Sm86,
    Sm89,
    Sm90,
    Sm90a,
    Sm100,
    Sm120,
}

impl Chip {
    pub const ALL: [Chip; 7] = [Chip::Sm80, Chip::Sm86, Chip::Sm89, Chip::Sm90, Chip::Sm90a, Chip::Sm100, Chip::Sm120];

    /// As NVIDIA's tools spell it.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    pub fn from_name(name: &str) -> Option<Chip> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }

    /// The PTX ISA version that code is written in, times ten: the first that knows the chip. LLVM ends the process when chip and
    /// version do not fit, so this table is the only source of the pair.
    pub fn ptx_version(self) -> u32 {
        self.row().1
    }

    fn row(self) -> (&'static str, u32) {
        match self {
            Chip::Sm80 => ("sm_80", 70),
            Chip::Sm86 => ("sm_86", 71),
            Chip::Sm89 => ("sm_89", 78),
            Chip::Sm90 => ("sm_90", 78),
            Chip::Sm90a => ("sm_90a", 80),
            Chip::Sm100 => ("sm_100", 86),
            Chip::Sm120 => ("sm_120", 87),
        }
    }
}

/// An x86-64 micro-architecture level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CpuClass {
    /// AVX2 and FMA: 16 registers of 8 f32.
    X86V3,
    /// AVX-512 (F, BW, CD, DQ, VL): 32 registers of 16 f32.
    X86V4,
}

impl CpuClass {
    pub const ALL: [CpuClass; 2] = [CpuClass::X86V3, CpuClass::X86V4];

    /// The name in `--cpu`, in the manifest and for LLVM.
    pub fn name(self) -> &'static str {
        match self {
            CpuClass::X86V3 => "x86-64-v3",
            CpuClass::X86V4 => "x86-64-v4",
        }
    }

    pub fn from_name(name: &str) -> Option<CpuClass> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }

    /// f32 lanes of a vector register.
    pub fn lanes(self) -> u32 {
        match self {
            CpuClass::X86V3 => 8,
            CpuClass::X86V4 => 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_found_by_its_name() {
        let named = CpuClass::ALL.map(Target::Cpu).into_iter().chain(Chip::ALL.map(Target::Cuda));
        for target in named.chain([Target::Emulated]) {
            assert_eq!(Target::from_name(&target.name()), Some(target));
        }
        assert_eq!(Target::from_name("cuda:sm_75"), None);
    }
}
