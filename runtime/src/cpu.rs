//! What this machine's CPU can run.

use crate::error::RunError;
use artifact::cpu::{CLASSES, Class, class};

/// Whether a bundle's target is a GPU.
pub fn is_gpu(name: &str) -> bool {
    name.starts_with("cuda:")
}

/// The target whose device kernels the emulator runs.
pub const EMULATED: &str = "cuda-emulated";

/// Whether this CPU has a feature of [`CLASSES`].
#[cfg(target_arch = "x86_64")]
fn has(feature: &str) -> bool {
    macro_rules! detect {
        ($($name:tt)+) => {
            match feature {
                $($name => std::arch::is_x86_feature_detected!($name),)+
                _ => false,
            }
        };
    }
    detect!("avx" "avx2" "bmi1" "bmi2" "f16c" "fma" "lzcnt" "movbe" "sse4.2" "ssse3"
            "avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl")
}

#[cfg(not(target_arch = "x86_64"))]
fn has(_: &str) -> bool {
    false
}

fn missing(class: &Class) -> Vec<&'static str> {
    class.features.iter().copied().filter(|f| !has(f)).collect()
}

/// The strongest class that this CPU belongs to.
pub fn this_machine() -> Option<&'static str> {
    CLASSES.iter().rev().find(|c| missing(c).is_empty()).map(|c| c.name)
}

/// Whether code for a class runs here.
///
/// # Errors
/// [`RunError::Cpu`] with what this CPU lacks.
pub fn check(name: &str) -> Result<(), RunError> {
    // What the emulator's code is made for.
    let name = if name == EMULATED { CLASSES[0].name } else { name };
    let error = |lacks: String| RunError::Cpu { wanted: name.to_string(), lacks, here: this_machine() };
    let class = class(name).ok_or_else(|| error("is not known to this program".into()))?;
    let missing = missing(class);
    if missing.is_empty() { Ok(()) } else { Err(error(format!("needs {}", missing.join(", ")))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_of_a_class_is_detected_by_name() {
        // A misspelt feature would always be missing: then v3 would be missing on the machines that build this.
        if let Some(here) = this_machine() {
            check(here).unwrap();
        }
        let text = check("x86-64-v9").unwrap_err().to_string();
        assert!(text.contains("x86-64-v9") && text.contains("not known"), "{text}");
    }
}
