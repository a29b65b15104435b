//! Pictures of a schedule in time: an SVG drawing, a page of HTML to look into, a trace for Perfetto.

pub mod drawing;
pub mod page;
pub mod scene;
pub mod trace;

use artifact::stream::Op;

/// The letter of a compute instruction; none for transfers and for the norm's sums, which take no time.
fn letter(op: Op) -> Option<&'static str> {
    match op {
        Op::F => Some("F"),
        Op::B(_) => Some("B"),
        Op::I => Some("I"),
        Op::W(_) => Some("W"),
        Op::U => Some("U"),
        Op::SendF | Op::RecvF | Op::SendB | Op::RecvB | Op::SendG | Op::RecvG => None,
        Op::N | Op::SendN | Op::RecvN | Op::T | Op::SendT | Op::RecvT => None,
    }
}
