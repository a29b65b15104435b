//! CPU classes that a bundle's machine code may ask for, and the features that each one stands for.

/// A class of x86-64 machines, by the psABI's name, and the features that code for it may use beyond the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// As in `--cpu` and in [`crate::program::Manifest::cpu`].
    pub name: &'static str,
    /// Names as `/proc/cpuinfo` and Rust's feature detection have them.
    pub features: &'static [&'static str],
}

/// Known classes, weakest first; each includes the one before it.
pub const CLASSES: [Class; 2] = [
    Class {
        name: "x86-64-v3",
        features: &["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "sse4.2", "ssse3"],
    },
    Class {
        name: "x86-64-v4",
        features: &[
            "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "sse4.2", "ssse3", "avx512f", "avx512bw",
            "avx512cd", "avx512dq", "avx512vl",
        ],
    },
];

/// The class of that name.
pub fn class(name: &str) -> Option<&'static Class> {
    CLASSES.iter().find(|c| c.name == name)
}
