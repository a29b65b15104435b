//! Checks on the object file of a kernel.

use crate::error::CodegenError;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, SectionKind};

const STEP: &str = "object";

/// Refuses an object that needs anything from outside or has data that is written.
pub fn check(kernel: &str, bytes: &[u8]) -> Result<(), CodegenError> {
    let fail = |message: String| CodegenError::new(kernel, STEP, message);
    let file = ElfFile64::<object::Endianness>::parse(bytes).map_err(|e| fail(e.to_string()))?;
    for symbol in file.symbols() {
        let name = symbol.name().unwrap_or_default();
        if symbol.is_undefined() && !name.is_empty() {
            return Err(fail(format!("it calls `{name}`, which is not part of it")));
        }
    }
    for section in file.sections() {
        let written = matches!(section.kind(), SectionKind::Data | SectionKind::UninitializedData | SectionKind::Tls);
        if written && section.size() > 0 {
            return Err(fail(format!("it has data that is written: section `{}`", section.name().unwrap_or_default())));
        }
    }
    Ok(())
}
