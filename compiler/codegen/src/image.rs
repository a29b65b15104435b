//! Objects -> position-independent image: sections laid out, PC-relative references resolved. No linker is needed.
//!
//! An image is mapped read-execute as one block. So a section that is written, a symbol from outside and a relocation that
//! would need the load address are errors.

use crate::error::CodegenError;
use crate::pipeline::Object as KernelObject;
use artifact::ids::StageId;
use artifact::program::{Image, Stage};
use object::read::elf::ElfFile64;
use object::{
    Endianness, Object, ObjectSection, ObjectSymbol, Relocation, RelocationKind, RelocationTarget, SectionIndex,
    SectionKind,
};
use std::collections::BTreeMap;

/// Every section starts at a multiple of this.
const ALIGN_BYTES: usize = 64;

type Elf<'d> = ElfFile64<'d, Endianness>;
/// Where a section starts in the code, by the section's index.
type SectionStarts = BTreeMap<usize, usize>;

/// The image of one stage: the kernels that its calls name, in the order of their index.
pub fn of_stage(stage: &Stage, objects: &[KernelObject]) -> Result<Image, CodegenError> {
    let mut parts = Vec::new();
    for index in used(stage) {
        let object = objects.get(index as usize).ok_or_else(|| {
            CodegenError::new(format!("image of stage {}", stage.stage), "image", format!("there is no kernel {index}"))
        })?;
        parts.push((index, object));
    }
    link(stage.stage, &parts)
}

/// The kernels that a stage's calls name, ascending.
pub fn used(stage: &Stage) -> Vec<u32> {
    let mut used = stage.bodies.calls().map(|call| call.kernel).collect::<Vec<_>>();
    used.sort_unstable();
    used.dedup();
    used
}

/// Links kernels, given with their index, to one image.
pub fn link(stage: StageId, kernels: &[(u32, &KernelObject)]) -> Result<Image, CodegenError> {
    let mut image = Image { stage, code: Vec::new(), exports: Vec::new(), cubin: None };
    for (index, kernel) in kernels {
        let entry = add(&mut image.code, kernel).map_err(|e| CodegenError::new(&kernel.kernel, "image", e))?;
        image.exports.push((*index, entry as u64));
    }
    Ok(image)
}

/// Adds one object to the code; gives where its kernel starts.
fn add(code: &mut Vec<u8>, kernel: &KernelObject) -> Result<usize, String> {
    let file = Elf::parse(kernel.bytes.as_slice()).map_err(|e| e.to_string())?;
    let starts = place_sections(code, &file)?;
    for (index, start) in &starts {
        let section = file.section_by_index(SectionIndex(*index)).map_err(|e| e.to_string())?;
        for (offset, relocation) in section.relocations() {
            relocate(code, &file, &starts, start + offset as usize, &relocation)?;
        }
    }
    let exported = file.symbols().find(|s| s.is_global() && s.name() == Ok(kernel.kernel.as_str()));
    let exported = exported.ok_or("it does not export its name")?;
    address(exported, &starts)
}

/// Copies what is executed or read into the code.
fn place_sections(code: &mut Vec<u8>, file: &Elf) -> Result<SectionStarts, String> {
    let mut starts = BTreeMap::new();
    for section in file.sections() {
        let name = section.name().map_err(|e| e.to_string())?;
        match section.kind() {
            SectionKind::Text | SectionKind::ReadOnlyData | SectionKind::ReadOnlyString if name != ".eh_frame" => {
                if section.align() > ALIGN_BYTES as u64 {
                    return Err(format!("section `{name}` wants an alignment of {} bytes", section.align()));
                }
                code.resize(code.len().next_multiple_of(ALIGN_BYTES), 0);
                starts.insert(section.index().0, code.len());
                code.extend_from_slice(section.data().map_err(|e| e.to_string())?);
            }
            SectionKind::Data
            | SectionKind::ReadOnlyDataWithRel
            | SectionKind::UninitializedData
            | SectionKind::Tls
                if section.size() > 0 =>
            {
                return Err(format!("section `{name}` would be written"));
            }
            _ => {}
        }
    }
    Ok(starts)
}

fn relocate(
    code: &mut [u8],
    file: &Elf,
    starts: &SectionStarts,
    at: usize,
    relocation: &Relocation,
) -> Result<(), String> {
    let relative = matches!(relocation.kind(), RelocationKind::Relative | RelocationKind::PltRelative);
    if !relative || relocation.size() != 32 {
        return Err(format!("a relocation of kind {:?} needs the load address", relocation.kind()));
    }
    let RelocationTarget::Symbol(symbol) = relocation.target() else {
        return Err("a relocation has no symbol".into());
    };
    let symbol = file.symbol_by_index(symbol).map_err(|e| e.to_string())?;
    let target = address(symbol, starts)? as i64;
    let distance = target + relocation.addend() - at as i64;
    let distance = i32::try_from(distance).map_err(|_| "the image is larger than 2 GiB")?;
    code.get_mut(at..at + 4).ok_or("a relocation outside of its section")?.copy_from_slice(&distance.to_le_bytes());
    Ok(())
}

fn address<'d>(symbol: impl ObjectSymbol<'d>, starts: &SectionStarts) -> Result<usize, String> {
    let section = symbol.section_index().and_then(|s| starts.get(&s.0));
    let section = section.ok_or_else(|| format!("`{}` is not part of it", symbol.name().unwrap_or("a symbol")))?;
    Ok(section + symbol.address() as usize)
}
