//! `paceline export FILE --csv`: the schedule as PyTorch's table of actions.

use crate::cli::Export;
use crate::driver;
use crate::failure::Failure;
use crate::output;
use plan::table::{Content, is_flush, write};

pub fn run(args: &Export) -> Result<(), Failure> {
    let analysed = driver::accepted(&args.spec)?.1;
    let program = &analysed.program;
    if program.copies > 1 {
        let name = &analysed.spec.schedule.name;
        return Err(Failure::Usage(format!(
            "`{name}` keeps two copies of every stage: a table of PyTorch's has no such stages"
        )));
    }
    let content = if args.comms { Content::ComputeComms } else { Content::ComputeOnly };
    let text = write(program, content, updates(program.streams.len(), program.accumulate));
    if !is_flush(program) {
        output::say(
            "note: the schedule updates each stage by itself, which PyTorch's runtime can't do: the table has Paceline's \
             own cells `<stage>U<update>`, and PyTorch's loader refuses it",
        );
    }
    match &args.output {
        Some(path) => std::fs::write(path, text).map_err(|e| Failure::file("write", path, e)),
        None => output::write(&text),
    }
}

/// Updates of an asynchronous schedule that are written: enough to see the start, the steady state and the end.
fn updates(ranks: usize, accumulate: u32) -> u64 {
    let microbatches = (3 * ranks as u64).max(12);
    microbatches.div_ceil(u64::from(accumulate)).max(2)
}
