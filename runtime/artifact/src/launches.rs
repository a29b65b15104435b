//! What a bundle's device kernels launch: functions that its images have, over grids and blocks that a GPU takes; and that it says what their
//! operands are made of.

use crate::program::{Image, KernelEntry, Launch, Manifest};

/// Threads of a warp, and most of a block.
const WARP: u32 = 32;
const THREADS_MAX: u32 = 1024;
/// Most blocks along y and z; along x there may be 2^31 - 1.
const GRID_YZ_MAX: u32 = 65_535;

/// What images of a target are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Code {
    /// Machine code of a CPU: a kernel is called.
    Cpu,
    /// A GPU's, as PTX.
    Ptx,
    /// Objects for the emulator.
    Object,
}

fn code(m: &Manifest) -> Code {
    match m.cpu.as_str() {
        "cuda-emulated" => Code::Object,
        gpu if gpu.starts_with("cuda:") => Code::Ptx,
        _ => Code::Cpu,
    }
}

/// Kernels of a GPU launch something, those of a CPU nothing; and each launch is one that a GPU takes.
pub(crate) fn shapes(m: &Manifest) -> Result<(), String> {
    let on_cpu = code(m) == Code::Cpu;
    for kernel in &m.kernels {
        let name = &kernel.name;
        if on_cpu != kernel.launches.is_empty() {
            let what = if on_cpu { "launches functions of a GPU" } else { "launches nothing" };
            return Err(format!("`{name}` {what}, and the images are for {}", m.cpu));
        }
        kernel.launches.iter().try_for_each(|launch| shape(name, launch))?;
        let operands = (kernel.args as usize).saturating_sub(usize::from(kernel.scratch_bytes > 0));
        if !on_cpu && kernel.elements.len() != operands {
            return Err(format!("`{name}` has {operands} operands, and elements of {}", kernel.elements.len()));
        }
    }
    Ok(())
}

fn shape(kernel: &str, launch: &Launch) -> Result<(), String> {
    let Launch { entry, grid, threads } = launch;
    let [x, y, z] = *grid;
    let fits = grid.iter().all(|n| *n > 0) && x <= i32::MAX as u32 && y <= GRID_YZ_MAX && z <= GRID_YZ_MAX;
    if !fits {
        return Err(format!("`{kernel}` launches `{entry}` over {x} x {y} x {z} blocks, which no GPU takes"));
    }
    if *threads == 0 || !threads.is_multiple_of(WARP) || *threads > THREADS_MAX {
        return Err(format!(
            "`{kernel}` launches `{entry}` in blocks of {threads} threads: it must be whole warps of {WARP}, at most {THREADS_MAX}"
        ));
    }
    Ok(())
}

/// Every function that a kernel of the image launches begins in the kernel's part of it.
pub(crate) fn entries(m: &Manifest, image: &Image) -> Result<(), String> {
    let kind = code(m);
    if kind == Code::Cpu {
        return Ok(());
    }
    let ends = image.exports.iter().skip(1).map(|e| e.1).chain([image.code.len() as u64]);
    for (&(kernel, start), end) in image.exports.iter().zip(ends) {
        let part = image.code.get(start as usize..end as usize).unwrap_or_default();
        let KernelEntry { name, launches, .. } = &m.kernels[kernel as usize];
        for Launch { entry, .. } in launches {
            let mark = match kind {
                Code::Ptx => format!(".entry {entry}("),
                // As a name in the object's table of strings.
                _ => format!("emu.{entry}\0"),
            };
            if !part.windows(mark.len()).any(|w| w == mark.as_bytes()) {
                return Err(format!("kernel {kernel}, `{name}`, launches `{entry}`, which its code does not have"));
            }
        }
    }
    Ok(())
}
