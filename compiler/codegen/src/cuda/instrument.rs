//! Rewrites a device kernel's LLVM IR so that the emulator runs it on the CPU.
//!
//! The arithmetic stays as it is. What changes:
//!
//! - before each load and store stands a call that checks the access: `emu_read`, `emu_write`, and those of shared memory;
//! - what a GPU does between threads becomes a call of the emulator: barriers, exchanges in a warp, votes. Each gets a number of its
//!   own, so that threads that wait at different places are told apart;
//! - so do products on tensor cores and what loads and rounds for them;
//! - so do the registers with the numbers of thread and block;
//! - each kernel gets an entry `emu.<name>` that takes one pointer to its operands' pointers.
//!
//! The emulator (crate `paceline-emulated`) has the other side.

use std::fmt::Write;

/// The NVVM intrinsics that kernels use, and what the emulator calls them. Those that meet other threads get the number of
/// their place as a last argument.
const CALLS: [(&str, &str, &str, bool); 8] = [
    ("read.ptx.sreg.tid.x", "emu_thread", "i32 ()", false),
    ("read.ptx.sreg.ctaid.x", "emu_block_x", "i32 ()", false),
    ("read.ptx.sreg.ctaid.y", "emu_block_y", "i32 ()", false),
    ("read.ptx.sreg.ctaid.z", "emu_block_z", "i32 ()", false),
    ("barrier.cta.sync.aligned.all", "emu_barrier", "void (i32, i32)", true),
    ("shfl.sync.bfly.f32", "emu_exchange", "float (i32, float, i32, i32, i32)", true),
    ("vote.ballot.sync", "emu_ballot", "i32 (i32, i1, i32)", true),
    ("f2tf32.rna", "emu_tf32", "i32 (float)", false),
];

/// Instructions of a whole warp with four results, as above with the types of arguments and of a result: a function of its own
/// passes both in memory, since how a structure is returned is nobody's promise.
const WARP_CALLS: [(&str, &str, &[&str], &str); 4] = [
    ("mma.m16n8k8.row.col.tf32", "emu_mma_tf32", &MMA, "float"),
    ("mma.m16n8k16.row.col.bf16", "emu_mma_bf16", &MMA, "float"),
    ("ldmatrix.sync.aligned.m8n8.x4.b16.p3", "emu_ldmatrix", &["ptr addrspace(3)"], "i32"),
    ("ldmatrix.sync.aligned.m8n8.x4.trans.b16.p3", "emu_ldmatrix_trans", &["ptr addrspace(3)"], "i32"),
];
/// Registers of A, B and C.
const MMA: [&str; 10] = ["i32", "i32", "i32", "i32", "i32", "i32", "float", "float", "float", "float"];

/// LLVM IR for this CPU.
///
/// # Errors
///
/// A sentence with the line that has something the emulator does not know.
pub fn for_emulator(device: &str) -> Result<String, String> {
    let mut text = String::new();
    let mut entries = Vec::new();
    let mut places = 0;
    for line in device.lines() {
        let code = line.trim_start();
        if code.starts_with("target ") || (code.starts_with("declare ") && code.contains("@llvm.nvvm.")) {
            continue;
        }
        if let Some(check) = check(code) {
            text += &check;
        }
        let line = if code.starts_with("define ptx_kernel ") {
            entries.push(entry(code)?);
            line.replacen("ptx_kernel ", "", 1)
        } else if code.contains("@llvm.nvvm.") {
            call(line, &mut places)?
        } else {
            line.into()
        };
        text += &line;
        text.push('\n');
    }
    for name in ["read", "write"] {
        let _ = writeln!(text, "declare void @emu_{name}(ptr, i32)");
        let _ = writeln!(text, "declare void @emu_{name}_shared(ptr addrspace(3), i32)");
    }
    for (_, name, ty, _) in CALLS {
        let (result, parameters) = ty.split_once(' ').expect("a result and parameters");
        let _ = writeln!(text, "declare {result} @{name}{parameters}");
    }
    WARP_CALLS.iter().for_each(|(_, name, arguments, result)| text += &through_memory(name, arguments, result));
    Ok(text + &entries.concat())
}

/// `@call.<name>`, which passes arguments and four results of [`WARP_CALLS`] in memory.
fn through_memory(name: &str, arguments: &[&str], result: &str) -> String {
    let structure = format!("{{ {result}, {result}, {result}, {result} }}");
    let parameters: Vec<_> = arguments.iter().enumerate().map(|(i, ty)| format!("{ty} %a{i}")).collect();
    let mut text = format!("declare void @{name}(ptr, ptr, i32)\n");
    let _ = writeln!(text, "define internal {structure} @call.{name}({}, i32 %place) {{", parameters.join(", "));
    text += "  %given = alloca [10 x i32], align 16\n  %got = alloca [4 x i32], align 16\n";
    for (i, parameter) in parameters.iter().enumerate() {
        let _ = writeln!(text, "  %g{i} = getelementptr i32, ptr %given, i64 {i}\n  store {parameter}, ptr %g{i}");
    }
    let _ = writeln!(text, "  call void @{name}(ptr %given, ptr %got, i32 %place)");
    let mut so_far = String::from("poison");
    for i in 0..4 {
        let _ = writeln!(text, "  %p{i} = getelementptr i32, ptr %got, i64 {i}\n  %r{i} = load {result}, ptr %p{i}");
        let _ = writeln!(text, "  %s{i} = insertvalue {structure} {so_far}, {result} %r{i}, {i}");
        so_far = format!("%s{i}");
    }
    text + &format!("  ret {structure} {so_far}\n}}\n")
}

/// The call that checks a load or store; none for other lines.
fn check(code: &str) -> Option<String> {
    let (name, ty, rest) = if let Some((_, load)) = code.split_once(" = load ") {
        let load = load.strip_prefix("volatile ").unwrap_or(load);
        let at = load.find(", ptr")?;
        ("emu_read", &load[..at], &load[at + 2..])
    } else {
        let store = code.strip_prefix("store ")?;
        let store = store.strip_prefix("volatile ").unwrap_or(store);
        let at = store.find(", ptr")?;
        let end = if store.starts_with('<') { store.find('>')? + 1 } else { store.find(' ')? };
        ("emu_write", &store[..end], &store[at + 2..])
    };
    let (pointer, _) = rest.rsplit_once(", align ")?;
    let bytes = bytes(ty)?;
    let shared = if pointer.starts_with("ptr addrspace(3) ") { "_shared" } else { "" };
    Some(format!("  call void @{name}{shared}({pointer}, i32 {bytes})\n"))
}

/// Bytes of a value of a type.
fn bytes(ty: &str) -> Option<u32> {
    if let Some(vector) = ty.strip_prefix('<') {
        let (count, element) = vector.strip_suffix('>')?.split_once(" x ")?;
        return Some(count.parse::<u32>().ok()? * bytes(element)?);
    }
    match ty {
        "i8" | "i1" => Some(1),
        "half" | "bfloat" | "i16" => Some(2),
        "float" | "i32" => Some(4),
        "double" | "i64" | "ptr" => Some(8),
        _ => None,
    }
}

/// A call of the emulator in place of an intrinsic's.
fn call(line: &str, places: &mut u32) -> Result<String, String> {
    let unknown = || format!("the emulator does not know `{}`", line.trim());
    let (before, call) = line.split_once("@llvm.nvvm.").ok_or_else(unknown)?;
    let (intrinsic, rest) = call.split_once('(').ok_or_else(unknown)?;
    let one = CALLS.iter().find(|c| c.0 == intrinsic).map(|c| (c.1.to_owned(), c.3));
    let of_warp = || WARP_CALLS.iter().find(|c| c.0 == intrinsic).map(|c| (format!("call.{}", c.1), true));
    let (name, meets) = one.or_else(of_warp).ok_or_else(unknown)?;
    // Attributes are of the intrinsic.
    let end = rest.rfind(')').ok_or_else(unknown)?;
    let mut arguments = rest[..end].to_string();
    if meets {
        *places += 1;
        if !arguments.is_empty() {
            arguments += ", ";
        }
        let _ = write!(arguments, "i32 {places}");
    }
    Ok(format!("{before}@{name}({arguments})"))
}

/// The entry of a kernel from its first line.
fn entry(define: &str) -> Result<String, String> {
    let wrong = || format!("this is not the head of a kernel: {define}");
    let (_, head) = define.split_once('@').ok_or_else(wrong)?;
    let (name, parameters) = head.split_once('(').ok_or_else(wrong)?;
    let count = parameters.split(", ").filter(|p| p.starts_with("ptr")).count();
    let mut text = format!("define void @emu.{name}(ptr %table) {{\n");
    for i in 0..count {
        let _ = writeln!(text, "  %at{i} = getelementptr ptr, ptr %table, i64 {i}\n  %p{i} = load ptr, ptr %at{i}");
    }
    let arguments = (0..count).map(|i| format!("ptr %p{i}")).collect::<Vec<_>>().join(", ");
    Ok(text + &format!("  call void @{name}({arguments})\n  ret void\n}}\n"))
}
