//! The `sched` dialect: streams of instructions and the kernel calls behind them, as MLIR.
//!
//! No pass runs on it. It is the readable and verified form of what the runtime executes: `paceline compile --emit sched`. A module
//! per rank holds its stream (`@prologue`, `@period`) and a module per stage with the body of each
//! instruction, whose calls name kernels by symbol and their operands by place in the rank's arena.
//!
//! The operations are defined in IRDL, so each one's attributes and operands are checked when a module is parsed.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use artifact::program::{Call, Place, Stage};
use artifact::stream::{Accumulation, Instr, Op, Program, Stream};
use model::kernel::Kernel;
use std::collections::BTreeSet;
use std::fmt::Write;

/// The dialect, in IRDL. Every attribute has a constraint value of its own: a shared one would demand equal attributes.
pub const DIALECT: &str = r##"
irdl.dialect @sched {
  irdl.type @buffer {}
  irdl.operation @place {
    %result = irdl.base @sched::@buffer
    %offset = irdl.base "#builtin.integer"
    %bytes = irdl.base "#builtin.integer"
    %stride = irdl.base "#builtin.integer"
    %slots = irdl.base "#builtin.integer"
    %by = irdl.base "#builtin.string"
    irdl.attributes { "offset" = %offset, "bytes" = %bytes, "stride" = %stride, "slots" = %slots, "by" = %by }
    irdl.results(place: %result)
  }
  irdl.operation @call {
    %place = irdl.base @sched::@buffer
    %kernel = irdl.base "#builtin.symbol_ref"
    irdl.attributes { "kernel" = %kernel }
    irdl.operands(args: variadic %place)
  }
  irdl.operation @f {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb }
  }
  irdl.operation @b {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    %first = irdl.base "#builtin.integer"
    %last = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb, "first" = %first, "last" = %last }
  }
  irdl.operation @i {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb }
  }
  irdl.operation @w {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    %first = irdl.base "#builtin.integer"
    %last = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb, "first" = %first, "last" = %last }
  }
  irdl.operation @u {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @send_f {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb }
  }
  irdl.operation @recv_f {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb }
  }
  irdl.operation @send_b {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb }
  }
  irdl.operation @recv_b {
    %stage = irdl.base "#builtin.integer"
    %mb = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "mb" = %mb }
  }
  irdl.operation @send_g {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @recv_g {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @n {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @send_n {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @recv_n {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @t {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @send_t {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
  irdl.operation @recv_t {
    %stage = irdl.base "#builtin.integer"
    %update = irdl.base "#builtin.integer"
    irdl.attributes { "stage" = %stage, "update" = %update }
  }
}
"##;

const SUBJECT: &str = "sched module";

/// The whole program as one verified module, as MLIR prints it.
pub fn module(
    context: &CodegenContext,
    program: &Program,
    stages: &[Stage],
    kernels: &[Kernel],
) -> Result<String, CodegenError> {
    let mut text = String::from("module @program {\n");
    for (rank, stream) in program.streams.iter().enumerate() {
        let _ = writeln!(text, "module @rank{rank} {{");
        stream_text(&mut text, stream);
        for stage in stages.iter().filter(|s| s.rank.index() == rank) {
            stage_text(&mut text, stage, kernels)?;
        }
        text += "}\n";
    }
    text += "}\n";
    Ok(context.parse(SUBJECT, "verify", &text)?.as_operation().to_string())
}

fn stream_text(text: &mut String, stream: &Stream) {
    let _ = writeln!(text, "func.func @prologue() {{");
    instructions(text, &stream.prologue);
    let _ = writeln!(
        text,
        "return\n}}\nfunc.func @period() attributes {{microbatches = {} : i32, updates = {} : i32}} {{",
        stream.microbatches, stream.updates
    );
    instructions(text, &stream.period);
    text.push_str("return\n}\n");
}

fn instructions(text: &mut String, list: &[Instr]) {
    for instr in list {
        let (name, accumulation) = match instr.op {
            Op::F => ("f", None),
            Op::B(a) => ("b", Some(a)),
            Op::I => ("i", None),
            Op::W(a) => ("w", Some(a)),
            Op::U => ("u", None),
            Op::SendF => ("send_f", None),
            Op::RecvF => ("recv_f", None),
            Op::SendB => ("send_b", None),
            Op::RecvB => ("recv_b", None),
            Op::SendG => ("send_g", None),
            Op::RecvG => ("recv_g", None),
            Op::N => ("n", None),
            Op::SendN => ("send_n", None),
            Op::RecvN => ("recv_n", None),
            Op::T => ("t", None),
            Op::SendT => ("send_t", None),
            Op::RecvT => ("recv_t", None),
        };
        let number = if instr.op.by_update() { "update" } else { "mb" };
        let _ = write!(text, "\"sched.{name}\"() {{stage = {} : i32, {number} = {} : i32", instr.stage, instr.mb);
        if let Some(Accumulation { first, last }) = accumulation {
            let _ = write!(text, ", first = {first}, last = {last}");
        }
        text.push_str("} : () -> ()\n");
    }
}

fn stage_text(text: &mut String, stage: &Stage, kernels: &[Kernel]) -> Result<(), CodegenError> {
    let bodies = &stage.bodies;
    let mut named: Vec<(String, &[Call])> =
        vec![("f".into(), &bodies.f), ("i".into(), &bodies.i), ("u".into(), &bodies.u), ("n".into(), &bodies.n)];
    for (variant, suffix) in ["", "_first", "_last", "_only"].iter().enumerate() {
        named.push((format!("b{suffix}"), &bodies.b[variant]));
        named.push((format!("w{suffix}"), &bodies.w[variant]));
    }
    named.retain(|(_, calls)| !calls.is_empty());
    let _ = writeln!(text, "module @stage{} {{", stage.stage);
    let used = named.iter().flat_map(|(_, calls)| calls.iter()).map(|c| c.kernel).collect::<BTreeSet<_>>();
    for kernel in used {
        let _ = writeln!(text, "func.func private @{}()", kernel_name(kernels, kernel)?);
    }
    for (name, calls) in named {
        let _ = writeln!(text, "func.func @{name}() {{");
        let mut places = 0;
        for call in calls {
            call_text(text, call, kernel_name(kernels, call.kernel)?, &mut places);
        }
        text.push_str("return\n}\n");
    }
    text.push_str("}\n");
    Ok(())
}

fn kernel_name(kernels: &[Kernel], index: u32) -> Result<&str, CodegenError> {
    let kernel = kernels.get(index as usize);
    kernel
        .map(|k| k.name.as_str())
        .ok_or_else(|| CodegenError::new(SUBJECT, "names", format!("there is no kernel {index}")))
}

/// `places` numbers the values of the function so far.
fn call_text(text: &mut String, call: &Call, kernel: &str, places: &mut usize) {
    let mut args = Vec::new();
    for Place { offset, bytes, stride, slots, by } in &call.args {
        let _ = writeln!(
            text,
            "%p{places} = \"sched.place\"() {{offset = {offset} : i64, bytes = {bytes} : i64, stride = {stride} : i64, \
             slots = {slots} : i32, by = \"{}\"}} : () -> !sched.buffer",
            by.name()
        );
        args.push(format!("%p{places}"));
        *places += 1;
    }
    let types = vec!["!sched.buffer"; args.len()].join(", ");
    let _ = writeln!(text, "\"sched.call\"({}) {{kernel = @{kernel}}} : ({types}) -> ()", args.join(", "));
}
