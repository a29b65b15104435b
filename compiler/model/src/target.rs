//! CPU classes: what code is generated for and what a bundle asks of the machine that runs it.

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
