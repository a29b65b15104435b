//! What one run of a study is: a setting, and the overrides of the template that make it.

use std::fmt;

/// The text that every run's spec starts from.
pub const TEMPLATE: &str = include_str!("../gpt.pace");

/// Sequences in an update, micro-batch × accumulate, the same in all studies.
pub const SEQUENCES: u32 = 16;
/// Updates of a run, of 1024 tokens each.
pub const UPDATES: u64 = 1000;
/// The learning rate rises over this share of the updates, then falls along a cosine to a tenth.
const WARMUP: f64 = 0.05;

/// How stale the weights of a backward pass and the gradients of an update are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    /// Synchronous 1F1B: nothing is stale.
    Flush,
    /// Asynchronous 1F1B; the backward pass reads the current weights.
    Paci,
    /// Asynchronous 1F1B; the backward pass reads the weights that its forward pass read (PipeDream).
    Stash,
    /// Two versions of the weights; every gradient is exactly one update late (PipeDream-2BW).
    DoubleBuffer,
    /// As `DoubleBuffer`, with error feedback on the updates.
    DoubleBufferFeedback,
}

impl Policy {
    /// As in the results' files.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Flush => "flush",
            Policy::Paci => "paci",
            Policy::Stash => "stash",
            Policy::DoubleBuffer => "2bw",
            Policy::DoubleBufferFeedback => "2bw+ef",
        }
    }

    fn overrides(self) -> &'static [&'static str] {
        match self {
            Policy::Flush => &["pipeline.schedule=one_f_one_b", "staleness.weights=current"],
            Policy::Paci => &["pipeline.schedule=async_1f1b", "staleness.weights=current"],
            Policy::Stash => &["pipeline.schedule=async_1f1b", "staleness.weights=stash"],
            Policy::DoubleBuffer => &["pipeline.schedule=async_1f1b", "staleness.weights=double_buffer"],
            Policy::DoubleBufferFeedback => &[
                "pipeline.schedule=async_1f1b",
                "staleness.weights=double_buffer",
                "staleness.correction=error_feedback",
            ],
        }
    }
}

/// An optimizer as it stands in a spec: its name, and its keys beside the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Optimizer {
    pub name: &'static str,
    pub keys: &'static str,
}

/// AdamW as in PACI's paper.
pub const ADAMW: Optimizer = Optimizer { name: "adamw", keys: "betas = (0.9, 0.95), decay = 0.1" };

/// One run. Everything that decides its numbers is here, in the template and in the corpus.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    pub policy: Policy,
    pub optimizer: Optimizer,
    /// Peak learning rate.
    pub rate: f64,
    pub ranks: u32,
    /// Micro-batches in an update, K.
    pub accumulate: u32,
    pub updates: u64,
    /// Of the initial weights and of the data's order.
    pub seed: u64,
}

impl Setting {
    /// Sequences in a micro-batch.
    pub fn microbatch(&self) -> u32 {
        SEQUENCES / self.accumulate
    }

    /// Arguments of `--set` that turn the template into this run's spec. The seed is not among them.
    pub fn overrides(&self) -> Vec<String> {
        let warmup = (self.updates as f64 * WARMUP).round() as u64;
        let Optimizer { name, keys } = self.optimizer;
        let (rate, total) = (self.rate, self.updates);
        let mut sets = vec![
            format!("machine.ranks={}", self.ranks),
            format!("pipeline.accumulate={}", self.accumulate),
            format!("pipeline.microbatch={}", self.microbatch()),
            format!("optimizer={name} {{ lr = cosine({rate:e}, warmup = {warmup}, total = {total}), {keys} }}"),
        ];
        sets.extend(self.policy.overrides().iter().map(|&set| set.to_owned()));
        sets
    }

    /// Names the run for ever: template without comments, overrides, seed and corpus, hashed.
    pub fn key(&self, corpus: &str) -> String {
        let template: Vec<&str> = TEMPLATE.lines().filter_map(|line| line.split("//").next()).map(str::trim).collect();
        let (template, overrides) = (template.join("\n"), self.overrides().join("\n"));
        let text = format!("{template}\n{overrides}\nseed {}\ncorpus {corpus}\n", self.seed);
        blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
    }

    pub fn with_seed(self, seed: u64) -> Setting {
        Setting { seed, ..self }
    }

    pub fn with_rate(self, rate: f64) -> Setting {
        Setting { rate, ..self }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Setting { policy, optimizer, rate, ranks, accumulate, seed, .. } = self;
        write!(f, "{} {} P={ranks} K={accumulate} lr={rate:e} seed={seed}", policy.name(), optimizer.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: Setting =
        Setting { policy: Policy::Paci, optimizer: ADAMW, rate: 3e-3, ranks: 8, accumulate: 4, updates: 1000, seed: 2 };

    #[test]
    fn overrides_make_the_spec() {
        let sets = RUN.overrides();
        assert!(sets.contains(&"pipeline.microbatch=4".to_owned()), "{sets:?}");
        let optimizer =
            "optimizer=adamw { lr = cosine(3e-3, warmup = 50, total = 1000), betas = (0.9, 0.95), decay = 0.1 }";
        assert!(sets.contains(&optimizer.to_owned()), "{sets:?}");
    }

    #[test]
    fn whatever_changes_the_numbers_changes_the_key() {
        let key = RUN.key("a");
        assert_eq!(key.len(), 16);
        assert_eq!(key, RUN.key("a"));
        let others = [
            RUN.key("b"),
            RUN.with_seed(3).key("a"),
            RUN.with_rate(1e-3).key("a"),
            Setting { policy: Policy::Stash, ..RUN }.key("a"),
            Setting { accumulate: 8, ..RUN }.key("a"),
            Setting { updates: 1001, ..RUN }.key("a"),
        ];
        assert!(others.iter().all(|other| *other != key), "{others:?}");
    }
}
