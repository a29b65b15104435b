//! How much work analyses do, in instructions looked at.
//!
//! # Meaning
//!
//! Every pass over instructions says how many it visits, each time it does. So work is a number that does not depend on the
//! machine, and tests can hold it against the size of a program. It is counted by thread, and only differences mean anything:
//! see [`counted`].

use std::cell::Cell;

thread_local! {
    static VISITED: Cell<u64> = const { Cell::new(0) };
}

/// Says that so many instructions are visited.
pub fn visit(instructions: usize) {
    VISITED.set(VISITED.get().wrapping_add(instructions as u64));
}

/// What `pass` returns, and how many instructions it visited.
pub fn counted<T>(pass: impl FnOnce() -> T) -> (T, u64) {
    let before = VISITED.get();
    let result = pass();
    (result, VISITED.get().wrapping_sub(before))
}
