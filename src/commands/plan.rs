//! `paceline plan FILE`: the instruction grid.

use crate::cli::Plan;
use crate::driver;
use crate::failure::Failure;
use crate::output;

pub fn run(args: &Plan) -> Result<(), Failure> {
    let analysed = driver::accepted(&args.spec)?.1;
    output::write(&plan::grid::grid(&analysed.program, &analysed.costs))
}
