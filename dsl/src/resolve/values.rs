//! Values to numbers: types, units, ranges.

use super::{Context, not_yet};
use crate::ast::{Name, Number, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::spec::{At, Limits};
use crate::suggest::{either, nearest};
use std::ops::RangeInclusive;

const BYTES: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// In nanoseconds.
const TIMES: [(&str, u64); 4] = [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];

/// In operations per second.
const FLOPS: [(&str, u64); 4] = [
    ("MFLOP/s", 1_000_000),
    ("GFLOP/s", 1_000_000_000),
    ("TFLOP/s", 1_000_000_000_000),
    ("PFLOP/s", 1_000_000_000_000_000),
];

/// In bytes per second.
const BANDWIDTHS: [(&str, u64); 6] = [
    ("MB/s", 1_000_000),
    ("GB/s", 1_000_000_000),
    ("TB/s", 1_000_000_000_000),
    ("MiB/s", 1 << 20),
    ("GiB/s", 1 << 30),
    ("TiB/s", 1 << 40),
];

/// Largest rate: the largest table of operations times a billion stays below 2^128.
const RATE_MAX: u64 = 1 << 60;

/// Largest memory, bytes: sums of it stay far from overflow.
const BYTES_MAX: u64 = 1 << 50;
/// Largest cost, nanoseconds (1000 s): the makespan of the largest plan stays below 2^64.
const TIME_NS_MAX: u64 = 1_000_000_000_000;

/// What a unit measures.
#[derive(Clone, Copy, PartialEq)]
enum Dimension {
    Bytes,
    Time,
    Share,
    Flops,
    Bandwidth,
}

/// Dimension and factor of a unit.
fn unit(name: &str) -> Option<(Dimension, u64)> {
    let among = |units: &[(&str, u64)]| units.iter().find(|(n, _)| *n == name).map(|(_, factor)| *factor);
    let share = (name == "%").then_some((Dimension::Share, 1));
    let bytes = among(&BYTES).map(|f| (Dimension::Bytes, f));
    let time = || among(&TIMES).map(|f| (Dimension::Time, f));
    let flops = || among(&FLOPS).map(|f| (Dimension::Flops, f));
    let bandwidth = || among(&BANDWIDTHS).map(|f| (Dimension::Bandwidth, f));
    share.or(bytes).or_else(time).or_else(flops).or_else(bandwidth)
}

impl Context {
    fn wrong_type(&mut self, value: &Value, what: &str, expected: &str) {
        if value.kind != ValueKind::Invalid {
            let message = format!("`{what}` is {expected}, not {}", value.kind.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            self.report(found.help(format!("give {expected}")));
        }
    }

    fn out_of_range(&mut self, value: &Value, what: &str, range: &str, help: &str) {
        let found = Diagnostic::error("P0208", value.span.clone(), format!("`{what}` is out of range"));
        self.report(found.here(format!("must be {range}")).help(help));
    }

    fn number<'v>(&mut self, value: &'v Value, what: &str, expected: &str) -> Option<&'v Number> {
        match &value.kind {
            ValueKind::Number(number) => Some(number),
            _ => {
                self.wrong_type(value, what, expected);
                None
            }
        }
    }

    /// A number without a unit.
    fn bare<'v>(&mut self, value: &'v Value, what: &str, expected: &str) -> Option<&'v Number> {
        let number = self.number(value, what, expected)?;
        let Some(name) = &number.unit else { return Some(number) };
        if unit(&name.text).is_none() {
            self.unknown_unit(name, &[]);
        } else {
            let found = Diagnostic::error("P0206", name.span.clone(), format!("`{what}` is a plain number"));
            self.report(found.help(format!("remove `{}`", name.text)));
        }
        None
    }

    fn unknown_unit(&mut self, name: &Name, wanted: &[(&str, u64)]) {
        let found = Diagnostic::error("P0205", name.span.clone(), format!("there is no unit `{}`", name.text));
        let all = BYTES.iter().chain(&TIMES).map(|(n, _)| *n);
        let wanted: Vec<&str> = wanted.iter().map(|(n, _)| *n).collect();
        let meant = nearest(&name.text, wanted.iter().copied()).or_else(|| nearest(&name.text, all));
        self.report(match meant {
            _ if wanted.is_empty() => found.help(format!("a plain number stands here: remove `{}`", name.text)),
            Some(meant) => found.help(format!("did you mean `{meant}`?")),
            None => found.help(format!("units here: {}", either(&wanted))),
        });
    }

    /// A whole number within `range`.
    pub fn count(&mut self, value: &Value, what: &str, range: RangeInclusive<u64>) -> Option<At<u64>> {
        let number = self.bare(value, what, "a whole number")?;
        if number.value.fract() != 0.0 {
            let message = format!("`{what}` is a whole number");
            let found = Diagnostic::error("P0209", value.span.clone(), message);
            let near = number.value.round().clamp(*range.start() as f64, *range.end() as f64);
            self.report(found.help(format!("e.g. {near}")));
            return None;
        }
        match number.whole.and_then(|n| u64::try_from(n).ok()) {
            Some(whole) if range.contains(&whole) => Some(At { value: whole, span: value.span.clone() }),
            _ => {
                let text = match *range.end() {
                    u64::MAX => format!("at least {}", range.start()),
                    end => format!("from {} to {end}", range.start()),
                };
                let near = number.value.clamp(*range.start() as f64, *range.end() as f64);
                self.out_of_range(value, what, &text, &format!("the nearest is {near}"));
                None
            }
        }
    }

    /// As [`Context::count`], for ranges below 2^32.
    pub fn count32(&mut self, value: &Value, what: &str, range: RangeInclusive<u64>) -> Option<At<u32>> {
        let At { value, span } = self.count(value, what, range)?;
        u32::try_from(value).ok().map(|value| At { value, span })
    }

    /// A real number without a unit for which `holds`; `range` says so in words.
    pub fn real(&mut self, value: &Value, what: &str, range: &str, holds: fn(f64) -> bool) -> Option<At<f64>> {
        let number = self.bare(value, what, "a number")?;
        if !holds(number.value) {
            self.out_of_range(value, what, range, &format!("give a number {range}"));
            return None;
        }
        Some(At { value: number.value, span: value.span.clone() })
    }

    /// A number with a unit, in the smallest unit of its dimension, rounded.
    fn quantity(&mut self, value: &Value, what: &str, wanted: Dimension) -> Option<u128> {
        let (units, expected): (&[(&str, u64)], _) = match wanted {
            Dimension::Bytes => (&BYTES, "a number of bytes, such as `128 MiB`"),
            Dimension::Flops => (&FLOPS, "a rate of operations, such as `400 TFLOP/s`"),
            Dimension::Bandwidth => (&BANDWIDTHS, "a rate of bytes, such as `50 GB/s`"),
            _ => (&TIMES, "a time, such as `500 us`"),
        };
        let number = self.number(value, what, expected)?;
        let factor = match &number.unit {
            None if number.value == 0.0 => 1,
            None => {
                let found = Diagnostic::error("P0206", value.span.clone(), format!("`{what}` needs a unit"));
                let unit = match wanted {
                    Dimension::Bytes => "MiB",
                    Dimension::Flops => "TFLOP/s",
                    Dimension::Bandwidth => "GB/s",
                    _ => "us",
                };
                self.report(found.help(format!("`{what}` is {expected}; perhaps `{} {unit}`", number.value)));
                return None;
            }
            Some(name) => match unit(&name.text) {
                Some((dimension, factor)) if dimension == wanted => factor,
                Some(_) => {
                    let message = format!("`{what}` can't be given in `{}`", name.text);
                    let found = Diagnostic::error("P0206", name.span.clone(), message);
                    let names: Vec<&str> = units.iter().map(|(n, _)| *n).collect();
                    self.report(found.help(format!("units here: {}", either(&names))));
                    return None;
                }
                None => {
                    self.unknown_unit(name, units);
                    return None;
                }
            },
        };
        match number.whole {
            Some(whole) if whole >= 0 => Some(whole as u128 * u128::from(factor)),
            _ if number.value < 0.0 => {
                self.out_of_range(value, what, "at least 0", "remove the `-`");
                None
            }
            // Saturates; the callers bound it.
            _ => Some((number.value * factor as f64).round() as u128),
        }
    }

    /// Bytes, at least 1.
    pub fn bytes(&mut self, value: &Value, what: &str) -> Option<At<u64>> {
        let bytes = self.quantity(value, what, Dimension::Bytes)?;
        match u64::try_from(bytes) {
            Ok(bytes) if (1..=BYTES_MAX).contains(&bytes) => Some(At { value: bytes, span: value.span.clone() }),
            _ => {
                self.out_of_range(value, what, "from 1 B to 1024 TiB", "check the unit, and count one rank only");
                None
            }
        }
    }

    /// Bytes of every rank, or a list with those of each.
    pub fn limits(&mut self, value: &Value, what: &str, ranks: Option<&At<u32>>) -> Option<Limits> {
        let ValueKind::List(items) = &value.kind else {
            return self.bytes(value, what).and_then(|at| Limits::new(vec![at]));
        };
        let bytes: Vec<Option<At<u64>>> = items.iter().map(|item| self.bytes(item, what)).collect();
        if let Some(ranks) = ranks
            && bytes.len() != ranks.value as usize
        {
            let message = format!("`{what}` has {} values for {} ranks", bytes.len(), ranks.value);
            let found = Diagnostic::error("P0217", value.span.clone(), message);
            let found = found.and_at(ranks.span.clone(), "the ranks");
            self.report(found.help("give one value for all ranks, or a list with one for each"));
            return None;
        }
        Limits::new(bytes.into_iter().collect::<Option<Vec<_>>>()?)
    }

    /// Nanoseconds, at least `least`.
    pub fn time_ns(&mut self, value: &Value, what: &str, least: u64) -> Option<u64> {
        let time = self.quantity(value, what, Dimension::Time)?;
        match u64::try_from(time) {
            Ok(time_ns) if (least..=TIME_NS_MAX).contains(&time_ns) => Some(time_ns),
            _ => {
                self.out_of_range(value, what, &format!("from {least} ns to 1000 s"), "check the unit");
                None
            }
        }
    }

    /// Operations per second.
    pub fn flops_per_s(&mut self, value: &Value, what: &str) -> Option<u64> {
        let rate = self.quantity(value, what, Dimension::Flops)?;
        self.rate(value, what, rate)
    }

    /// Bytes per second.
    pub fn bytes_per_s(&mut self, value: &Value, what: &str) -> Option<u64> {
        let rate = self.quantity(value, what, Dimension::Bandwidth)?;
        self.rate(value, what, rate)
    }

    fn rate(&mut self, value: &Value, what: &str, rate: u128) -> Option<u64> {
        let found = u64::try_from(rate).ok().filter(|rate| (1..=RATE_MAX).contains(rate));
        if found.is_none() {
            self.out_of_range(value, what, "above 0, and at most 2^60 per second", "check the unit");
        }
        found
    }

    /// A share: `5 %` or `0.05`.
    pub fn share(&mut self, value: &Value, what: &str) -> Option<At<f64>> {
        let number = self.number(value, what, "a share, such as `5 %`")?;
        let share = match &number.unit {
            None => number.value,
            Some(name) => match unit(&name.text) {
                Some((Dimension::Share, _)) => number.value / 100.0,
                Some(_) => {
                    let message = format!("`{what}` can't be given in `{}`", name.text);
                    self.report(Diagnostic::error("P0206", name.span.clone(), message).help("give it in `%`"));
                    return None;
                }
                None => {
                    self.unknown_unit(name, &[("%", 1)]);
                    return None;
                }
            },
        };
        if (0.0..=1.0).contains(&share) {
            return Some(At { value: share, span: value.span.clone() });
        }
        let found = Diagnostic::error("P0208", value.span.clone(), format!("`{what}` is out of range"));
        let found = found.here("must be from 0 % to 100 %");
        self.report(match number.unit {
            None if (1.0..=100.0).contains(&number.value) => {
                found.help(format!("a plain number is a fraction of 1; did you mean `{} %`?", number.value))
            }
            _ => found.help("give a share from 0 % to 100 %"),
        });
        None
    }

    /// One of `known`. A word of `later` is refused as not built.
    pub fn word(&mut self, value: &Value, what: &str, known: &[&'static str], later: &[&str]) -> Option<&'static str> {
        let word = match &value.kind {
            ValueKind::Word(word) => word.as_str(),
            ValueKind::Call(name, _) | ValueKind::Record(Some(name), _) if later.contains(&name.text.as_str()) => {
                &name.text
            }
            _ => {
                self.wrong_type(value, what, &either(known));
                return None;
            }
        };
        if let Some(found) = known.iter().find(|k| **k == word) {
            return Some(found);
        }
        if later.contains(&word) {
            let instead = format!("use {}", either(known));
            not_yet(self, &value.span, &format!("`{what} = {word}`"), &instead);
            return None;
        }
        let found = Diagnostic::error("P0210", value.span.clone(), format!("`{what}` can't be `{word}`"));
        self.report(match nearest(word, known.iter().copied()) {
            Some(meant) => found.help(format!("did you mean `{meant}`?")),
            None => found.help(format!("it is {}", either(known))),
        });
        None
    }

    /// `on` or `off`.
    pub fn switch(&mut self, value: &Value, what: &str) -> Option<At<bool>> {
        let word = self.word(value, what, &["on", "off"], &[])?;
        Some(At { value: word == "on", span: value.span.clone() })
    }
}
