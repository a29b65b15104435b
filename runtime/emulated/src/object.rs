//! ELF object -> bytes at fixed distances: code and constants, calls of the emulator, shared memory.

use object::read::elf::ElfFile64;
use object::{
    Endianness, Object, ObjectSection, ObjectSymbol, RelocationKind, RelocationTarget, SectionKind, SymbolKind,
};
use std::collections::BTreeMap;
use std::ops::Range;

type Elf<'d> = ElfFile64<'d, Endianness>;

/// Every section starts at a multiple of this.
const ALIGN_BYTES: usize = 64;
/// What is mapped with rights of its own starts at a multiple of this.
pub const PAGE_BYTES: usize = 4096;

/// Offsets are from the start of the mapping.
#[derive(Debug, Default)]
pub struct Layout {
    /// What is mapped: code, constants and calls first, shared memory from `shared_start` on.
    pub bytes: Vec<u8>,
    pub shared_start: usize,
    /// The arrays in shared memory.
    pub shared: Vec<Range<usize>>,
    pub entries: BTreeMap<String, usize>,
}

/// Lays an object out. `outside` gives the address of what the object calls.
pub fn layout(object: &[u8], outside: impl Fn(&str) -> Option<u64>) -> Result<Layout, String> {
    let file = Elf::parse(object).map_err(|e| e.to_string())?;
    let mut made = Layout::default();
    let mut starts = BTreeMap::new();
    place(&file, &mut made.bytes, &mut starts, |kind| {
        matches!(kind, SectionKind::Text | SectionKind::ReadOnlyData | SectionKind::ReadOnlyString)
    })?;
    let calls = calls(&file, &mut made.bytes, outside)?;
    made.shared_start = made.bytes.len().next_multiple_of(PAGE_BYTES);
    made.bytes.resize(made.shared_start, 0);
    place(&file, &mut made.bytes, &mut starts, |kind| {
        matches!(kind, SectionKind::Data | SectionKind::UninitializedData)
    })?;
    made.bytes.resize(made.bytes.len().next_multiple_of(PAGE_BYTES).max(made.shared_start + PAGE_BYTES), 0);
    for symbol in file.symbols() {
        let (Ok(name), Some(section)) = (symbol.name(), symbol.section_index()) else { continue };
        let Some(start) = starts.get(&section.0) else { continue };
        let at = start + symbol.address() as usize;
        if at >= made.shared_start && symbol.kind() == SymbolKind::Data {
            made.shared.push(at..at + symbol.size() as usize);
        } else if let Some(name) = name.strip_prefix("emu.") {
            made.entries.insert(name.into(), at);
        }
    }
    resolve(&file, &mut made.bytes, &starts, &calls)?;
    Ok(made)
}

/// Appends the sections of some kinds.
fn place(
    file: &Elf,
    bytes: &mut Vec<u8>,
    starts: &mut BTreeMap<usize, usize>,
    wanted: impl Fn(SectionKind) -> bool,
) -> Result<(), String> {
    for section in file.sections() {
        if !wanted(section.kind()) || section.name() == Ok(".eh_frame") || section.size() == 0 {
            continue;
        }
        bytes.resize(bytes.len().next_multiple_of(ALIGN_BYTES.max(section.align() as usize)), 0);
        starts.insert(section.index().0, bytes.len());
        let size = section.size() as usize;
        let data = section.data().map_err(|e| e.to_string())?;
        let end = bytes.len() + size;
        bytes.extend_from_slice(data);
        // Memory that starts as zeros is not in the file.
        bytes.resize(end, 0);
    }
    Ok(())
}

/// A jump to each function outside, whose address may be further than a call reaches; gives where the jumps are by symbol.
fn calls(
    file: &Elf,
    bytes: &mut Vec<u8>,
    outside: impl Fn(&str) -> Option<u64>,
) -> Result<BTreeMap<usize, usize>, String> {
    let mut calls = BTreeMap::new();
    for symbol in file.symbols().filter(|s| s.is_undefined()) {
        let name = symbol.name().map_err(|e| e.to_string())?;
        if name.is_empty() {
            continue;
        }
        let address = outside(name).ok_or_else(|| format!("it calls `{name}`, which the emulator does not have"))?;
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        calls.insert(symbol.index().0, bytes.len());
        // jmp *0(%rip), then the address.
        bytes.extend_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
        bytes.extend_from_slice(&address.to_le_bytes());
    }
    Ok(calls)
}

fn resolve(
    file: &Elf,
    bytes: &mut [u8],
    starts: &BTreeMap<usize, usize>,
    calls: &BTreeMap<usize, usize>,
) -> Result<(), String> {
    for (index, start) in starts {
        let section = file.section_by_index(object::SectionIndex(*index)).map_err(|e| e.to_string())?;
        for (offset, relocation) in section.relocations() {
            let relative = matches!(relocation.kind(), RelocationKind::Relative | RelocationKind::PltRelative);
            let RelocationTarget::Symbol(target) = relocation.target() else {
                return Err("a relocation has no symbol".into());
            };
            if !relative || relocation.size() != 32 {
                return Err(format!("a relocation of kind {:?} needs the load address", relocation.kind()));
            }
            let symbol = file.symbol_by_index(target).map_err(|e| e.to_string())?;
            let inside = symbol.section_index().and_then(|s| starts.get(&s.0)).map(|s| s + symbol.address() as usize);
            let to = inside.or_else(|| calls.get(&target.0).copied());
            let to = to.ok_or_else(|| format!("`{}` is nowhere", symbol.name().unwrap_or("a symbol")))?;
            let at = start + offset as usize;
            let distance = to as i64 + relocation.addend() - at as i64;
            let distance = i32::try_from(distance).map_err(|_| "the object is larger than 2 GiB")?;
            bytes[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
    }
    Ok(())
}
