//! Random specifications as text: library schedules, library schedules with a changed number or line, and orders of every
//! kind, from likely ones to wild ones; with random costs, bounds and boundaries.

use crate::interpreter::Random;
use std::fmt::Write;

/// A specification's text.
pub fn text(random: &mut Random) -> String {
    let ranks = match random.below(4) {
        0 => 1 + random.below(12),
        1 => 1 + random.below(8),
        _ => 1 + random.below(4),
    };
    let chunks = 1 + random.below(3);
    let (name, schedule, stages) = schedule(random, ranks, chunks);
    let accumulate = accumulate(random, ranks);
    let mut text = format!("machine {{\n  ranks = {ranks}\n{}}}\n", costs(random, stages));
    let _ = write!(text, "pipeline {{\n  schedule = {name}\n  accumulate = {accumulate}\n  chunks = {chunks}\n");
    if random.one_in(4) {
        let _ = writeln!(text, "  boundary every {} updates", 1 + random.below(5));
    }
    text.push_str("}\n");
    if random.one_in(3) {
        let (bound, most) = (random.pick(&["drift", "delay"]), random.below(4));
        let _ = writeln!(text, "staleness {{ {bound} <= {most} }}");
    }
    if random.one_in(48) {
        let _ = writeln!(text, "require {{ bubble <= {} % }}", 20 + random.below(70));
    }
    text + &schedule
}

/// Few micro-batches, or a multiple of the ranks, so that groups divide them.
fn accumulate(random: &mut Random, ranks: u64) -> u64 {
    match random.below(3) {
        0 => 1 + random.below(12),
        1 => ranks * (1 + random.below(if ranks > 6 { 2 } else { 3 })),
        _ => 2 * ranks + random.below(3),
    }
}

/// Equal stages, or not; hops for nothing, or not.
fn costs(random: &mut Random, stages: u64) -> String {
    let mut text = String::from("  cost {");
    let whole = random.one_in(4);
    let uneven = random.one_in(2);
    for action in if whole { &["F", "B"][..] } else { &["F", "I", "W"] } {
        let one = |random: &mut Random| format!("{} ns", 2 + random.below(5));
        let value = if uneven {
            let list: Vec<String> = (0..stages).map(|_| one(random)).collect();
            format!("[{}]", list.join(", "))
        } else {
            one(random)
        };
        let _ = write!(text, " {action} = {value},");
    }
    if random.one_in(3) {
        let _ = write!(text, " U = {} ns,", random.below(9));
    }
    let _ = writeln!(text, " hop = {} ns }}", if random.one_in(2) { 0 } else { random.below(6) });
    text
}

/// Name, definition if it is not the library's, and stages.
fn schedule(random: &mut Random, ranks: u64, chunks: u64) -> (String, String, u64) {
    let own = |(clauses, per_rank): (String, u64)| {
        (String::from("mine"), format!("schedule mine {{\n{clauses}}}\n"), ranks * per_rank)
    };
    match random.below(12) {
        0..=2 => library(random, ranks, chunks),
        3..=4 => own(changed(random, chunks)),
        5..=8 => own((linear(random), 1)),
        9 => own(looped(random, chunks)),
        10 if random.one_in(3) => own((wave(random, "bidirectional"), 1)),
        10 => own((wave(random, "wave"), 2)),
        _ => own(block(random)),
    }
}

/// Stages a rank of a library schedule.
fn per_rank(source: &str, chunks: u64) -> u64 {
    match () {
        () if source.contains("place    wave") => 2,
        () if source.contains("loop(v)") => chunks,
        // Two copies of one.
        () => 1,
    }
}

fn library(random: &mut Random, ranks: u64, chunks: u64) -> (String, String, u64) {
    let name = random.pick(&dsl::library::names());
    let source = dsl::library::source(name).expect("a listed name has a file");
    (name.into(), String::new(), ranks * per_rank(source, chunks))
}

/// A library schedule with one number changed, two lines swapped, or none.
fn changed(random: &mut Random, chunks: u64) -> (String, u64) {
    let source = dsl::library::source(random.pick(&dsl::library::names())).expect("a listed name has a file");
    let body = source.split_once("schedule ").and_then(|(_, rest)| rest.split_once('{')).expect("a schedule").1;
    let mut lines: Vec<String> = body.trim_end().trim_end_matches('}').lines().map(String::from).collect();
    let start = lines.iter().position(|l| l.trim() == "order {").expect("an order") + 1;
    let inside: Vec<usize> = (start..lines.len()).filter(|at| lines[*at].contains(['F', 'B', 'I', 'W'])).collect();
    let at = inside[random.below(inside.len() as u64) as usize];
    match random.below(4) {
        0 if inside.contains(&(at + 1)) => lines.swap(at, at + 1),
        0..=2 => {
            let digits: Vec<usize> = lines[at].match_indices(['0', '1', '2', '3']).map(|(i, _)| i).collect();
            if !digits.is_empty() {
                let digit = digits[random.below(digits.len() as u64) as usize];
                lines[at].replace_range(digit..=digit, random.pick(&["0", "1", "2", "3"]));
            }
        }
        _ => {}
    }
    (lines.join("\n") + "\n", per_rank(source, chunks))
}

/// A sum of ranks, this rank, and small numbers, sometimes with the round, sometimes capped.
fn expression(random: &mut Random, round: bool) -> String {
    let mut sum = random.below(4).to_string();
    for variable in if round { &["P", "s", "n"][..] } else { &["P", "s"] } {
        let factor = random.below(3);
        if factor > 0 {
            let _ = write!(sum, " {} {factor} * {variable}", random.pick(&["+", "+", "-"]));
        }
    }
    match random.below(8) {
        0 => format!("min({sum}, K)"),
        1 => format!("max({sum}, {})", random.below(3)),
        2 => format!("({sum}) / {}", 1 + random.below(3)),
        _ => sum,
    }
}

fn condition(random: &mut Random) -> String {
    let likely = ["P - 1 - s + n >= P - 1", "n >= s", "n >= 1", "n >= P - 1 - s", "n >= 2 * (P - 1)"];
    match random.below(3) {
        0 => {
            let (left, right) = (expression(random, true), expression(random, true));
            format!("{left} {} {right}", random.pick(&["<", "<=", "==", ">=", ">"]))
        }
        _ => random.pick(&likely).into(),
    }
}

/// Forward passes of the warm-up, mostly as many as are needed.
fn warmup(random: &mut Random) -> String {
    let likely =
        ["P - 1 - s", "P - 1 - s", "P - s", "2 * (P - 1 - s)", "P - 1 - s + 1", "max(P - 1 - s, 2)", "3 * (P - 1 - s)"];
    if random.one_in(6) { expression(random, false) } else { random.pick(&likely).into() }
}

/// The steps of a round.
fn body(random: &mut Random, actions: &[&str]) -> String {
    let mut steps: Vec<String> = actions.iter().map(|action| String::from(*action)).collect();
    if random.one_in(8) {
        let (a, b) = (random.below(steps.len() as u64) as usize, random.below(steps.len() as u64) as usize);
        steps.swap(a, b);
    }
    for (at, step) in steps.iter_mut().enumerate() {
        let conditional = if actions[at].starts_with('W') { random.one_in(2) } else { random.one_in(12) };
        if conditional {
            let _ = write!(step, " when {}", condition(random));
        }
    }
    steps.join("; ")
}

fn clauses(place: &str, split: bool, local: bool) -> String {
    format!(
        "  place {place}\n  backward {}\n  {} every accumulate\n",
        if split { "split" } else { "whole" },
        if local { "update local" } else { "flush" }
    )
}

fn actions(split: bool) -> &'static [&'static str] {
    if split { &["F", "I", "W"] } else { &["F", "B"] }
}

fn linear(random: &mut Random) -> String {
    let (split, local) = (random.one_in(2), random.below(4) > 0);
    let actions = actions(split);
    let mut text = clauses("linear", split, local);
    let _ = writeln!(text, "  order {{\n    warmup {} {{ F }}", warmup(random));
    if random.one_in(6) {
        let some = 1 + random.below(actions.len() as u64) as usize;
        let (keyword, count) = (random.pick(&["warmup", "repeat"]), expression(random, false));
        let _ = writeln!(text, "    {keyword} {count} {{ {} }}", body(random, &actions[..some]));
    }
    let _ = writeln!(text, "    repeat {{ {} }}", body(random, actions));
    if !random.one_in(16) {
        let _ = writeln!(text, "    drain {{ {} }}", actions.join("; "));
    }
    text + "  }\n"
}

/// Several stages a rank, in sequences.
fn looped(random: &mut Random, chunks: u64) -> (String, u64) {
    let split = random.one_in(2);
    let actions = actions(split);
    let fixed = random.one_in(2);
    let per_rank = if fixed { 1 + random.below(3) } else { chunks };
    let place = if fixed { format!("loop({per_rank})") } else { "loop(v)".into() };
    let mut text = clauses(&place, split, false);
    let groups = ["P", "P", "M", "M", "1", "2", "2 * P", "M / max(1, M / P)"];
    let same = random.pick(&groups);
    for action in actions {
        let size = if random.one_in(6) { random.pick(&groups) } else { same };
        let ascending = (*action == "F") != random.one_in(12);
        let direction = if ascending { "ascending" } else { "descending" };
        let _ = writeln!(text, "  sequence {action} = groups({size}) chunks {direction}");
    }
    let counts = [
        "2 * (P - 1 - s) + (v - 1) * P",
        "P - 1 - s + (v - 1) * P",
        "2 * (P - 1 - s) + (v - 1) * (M / max(1, M / P))",
        "v * M",
        "v * M - s",
        "(v - 1) * M + P - 1 - s",
    ];
    let count = if random.one_in(8) { expression(random, false) } else { random.pick(&counts).into() };
    let _ = writeln!(text, "  order {{\n    warmup {count} {{ F }}\n    repeat {{ {} }}", body(random, actions));
    let _ = writeln!(text, "    drain {{ {} }}\n  }}", actions[1..].join("; "));
    (text, per_rank)
}

/// There and back, or two stages a rank in turn, by name.
fn wave(random: &mut Random, place: &str) -> String {
    let split = random.below(3) > 0;
    let steps: &[&str] = if split {
        random.pick(&[&["F0", "I0", "W0", "F1", "I1", "W1"][..], &["F1", "I1", "W1", "F0", "I0", "W0"]])
    } else {
        random.pick(&[&["F0", "B0", "F1", "B1"][..], &["F1", "B1", "F0", "B0"]])
    };
    let place = if place == "wave" && random.one_in(5) { "loop(2)" } else { place };
    let mut text = clauses(place, split, false) + "  order {\n";
    let forward = ["2 * (P - s) - 1", "2 * P - 1 - s", "M", "P - s", "2 * P"];
    let _ = writeln!(text, "    warmup {} {{ F0 }}", random.pick(&forward));
    let second = ["s", "P - 1 - s", "P", "M", "s + 1"];
    let _ = writeln!(text, "    warmup {} {{ {} }}", random.pick(&second), random.pick(&["F1; F0", "F0; F1", "F1"]));
    let _ = writeln!(text, "    repeat {{ {} }}", body(random, steps));
    let rest: Vec<&str> = steps.iter().filter(|s| !s.starts_with('F')).copied().collect();
    let _ = writeln!(text, "    drain {{ {} }}\n    drain {{ {} }}\n  }}", steps[..1].join("; "), rest.join("; "));
    text
}

/// Times of one micro-batch's actions: down and back at random speeds, with gaps.
fn block(random: &mut Random) -> (String, u64) {
    let (split, wave) = (random.below(3) > 0, random.one_in(2));
    let place = if wave { "wave" } else { "linear" };
    let mut text = clauses(place, split, false);
    let actions = if split { 3 } else { 3 * u64::from(wave) + 3 };
    let interval = if wave && split { 6 } else { actions } + random.below(3);
    let _ = writeln!(text, "  order {{\n    block every {interval} {{");
    let gap = |random: &mut Random| if random.one_in(8) { random.below(4) } else { 1 + random.below(2) };
    let (forward, back) = (1 + random.below(2), 1 + random.below(3));
    let backward = if split { "I" } else { "B" };
    if wave {
        let turn = format!("{forward} * (P - 1) + {}", gap(random));
        let _ = writeln!(text, "      F0 at {forward} * s\n      F1 at {turn} + P - 1 - s");
        let again = format!("{turn} + P - 1 + {}", gap(random));
        let _ = writeln!(text, "      {backward}1 at {again} + {back} * s");
        let (down, last) = (1 + random.below(2) + u64::from(!split), gap(random) + u64::from(!split));
        let _ = writeln!(text, "      {backward}0 at {again} + {back} * (P - 1) + {last} + {down} * (P - 1 - s)");
        text.push_str(if split { "      W1\n      W0\n" } else { "" });
    } else {
        let _ = writeln!(text, "      F at {forward} * s");
        if random.one_in(4) {
            let _ = writeln!(text, "      {backward}");
        } else {
            let end = format!("{forward} * (P - 1) + {} + {}", gap(random), back + u64::from(!split));
            let _ = writeln!(text, "      {backward} at {end} * (P - 1 - s)");
        }
        text.push_str(if split { "      W\n" } else { "" });
    }
    text.push_str("    }\n  }\n");
    (text, if wave { 2 } else { 1 })
}
