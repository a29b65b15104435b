//! Training and evaluation data.
//!
//! A file whose name ends in `.bin` holds little-endian tokens: u16 when it ends in `.u16.bin` or the vocabulary has at most
//! 65,536 tokens, u32 when it ends in `.u32.bin` or the vocabulary is larger. Any other file is text, a token for each byte.
//! Several files are read as if they were one; a held-out fraction is the tail of each file.
//!
//! Sequence `q` of training (`q = micro-batch * microbatch + row`, micro-batches counted from the run's start) begins at token
//! `draw(seed, "data", q) mod (tokens - context)`; its targets are one token further. Evaluation reads its data from the
//! start, `context` tokens a sequence, in whole micro-batches.

use crate::draw::Draws;
use crate::error::RunError;
use artifact::program::DataShape;
use std::path::{Path, PathBuf};

/// A long sequence of tokens, each in as few bytes as all need.
#[derive(Clone, Debug, PartialEq)]
pub enum Tokens {
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl Tokens {
    pub fn len(&self) -> u64 {
        match self {
            Tokens::U8(v) => v.len() as u64,
            Tokens::U16(v) => v.len() as u64,
            Tokens::U32(v) => v.len() as u64,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the tokens from `start` on into `out`; they must be there.
    pub fn copy(&self, start: u64, out: &mut [u32]) {
        fn widen<T: Copy + Into<u32>>(from: &[T], out: &mut [u32]) {
            for (o, &t) in out.iter_mut().zip(from) {
                *o = t.into();
            }
        }
        let range = start as usize..start as usize + out.len();
        match self {
            Tokens::U8(v) => widen(&v[range], out),
            Tokens::U16(v) => widen(&v[range], out),
            Tokens::U32(v) => out.copy_from_slice(&v[range]),
        }
    }

    /// The first token that is not below `vocab`, with its index.
    fn first_outside(&self, vocab: u32) -> Option<(u64, u32)> {
        fn find<T: Copy + Into<u32>>(v: &[T], vocab: u32) -> Option<(u64, u32)> {
            v.iter().position(|&t| t.into() >= vocab).map(|i| (i as u64, v[i].into()))
        }
        match self {
            Tokens::U8(v) => find(v, vocab),
            Tokens::U16(v) => find(v, vocab),
            Tokens::U32(v) => find(v, vocab),
        }
    }

    /// Takes the last `count` tokens away.
    fn split_tail(&mut self, count: u64) -> Tokens {
        let at = (self.len() - count) as usize;
        match self {
            Tokens::U8(v) => Tokens::U8(v.split_off(at)),
            Tokens::U16(v) => Tokens::U16(v.split_off(at)),
            Tokens::U32(v) => Tokens::U32(v.split_off(at)),
        }
    }

    fn append(&mut self, more: Tokens) {
        match (self, more) {
            (Tokens::U8(a), Tokens::U8(b)) => a.extend(b),
            (Tokens::U16(a), Tokens::U16(b)) => a.extend(b),
            (this, more) => {
                let mut all = this.to_u32();
                all.extend(more.to_u32());
                *this = Tokens::U32(all);
            }
        }
    }

    fn to_u32(&self) -> Vec<u32> {
        let mut out = vec![0; self.len() as usize];
        self.copy(0, &mut out);
        out
    }
}

/// Tokens to train on, and held-out ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Data {
    pub train: Tokens,
    pub eval: Option<Tokens>,
}

impl Data {
    /// Reads all files. `holdout` is the fraction of the training files that is kept for evaluation; `eval` names files for it.
    ///
    /// # Errors
    /// A file that can't be read, a token outside the vocabulary, too little data for one sequence (training) or one
    /// micro-batch (evaluation), a fraction that is not between 0 and 1.
    pub fn read(train: &[PathBuf], eval: &[PathBuf], holdout: Option<f64>, shape: DataShape) -> Result<Data, RunError> {
        if train.is_empty() {
            return Err(RunError::Usage("there is nothing to train on: name a file with `--data`".into()));
        }
        let fraction = holdout.unwrap_or(0.0);
        if !(0.0..1.0).contains(&fraction) {
            return Err(RunError::Usage(format!("the held-out fraction {fraction} is not between 0 and 1")));
        }
        if holdout.is_some() && !eval.is_empty() {
            return Err(RunError::Usage("`--eval` and `--holdout` exclude each other".into()));
        }
        let (train, held) = read_files(train, fraction, shape)?;
        let eval = if eval.is_empty() { held } else { Some(read_files(eval, 0.0, shape)?.0) };
        let needed = u64::from(shape.context) + 1;
        if train.len() < needed {
            return Err(too_short("training data", train.len(), needed));
        }
        if let Some(eval) = &eval {
            let needed = u64::from(shape.context) * u64::from(shape.microbatch) + 1;
            if eval.len() < needed {
                return Err(too_short("held-out data", eval.len(), needed));
            }
        }
        Ok(Data { train, eval })
    }
}

fn too_short(what: &str, found: u64, needed: u64) -> RunError {
    RunError::DataLength(format!("the {what} has {found} tokens, and {needed} are the least that can be used"))
}

/// The files' tokens without and with the tail of each.
fn read_files(paths: &[PathBuf], fraction: f64, shape: DataShape) -> Result<(Tokens, Option<Tokens>), RunError> {
    let (mut all, mut tails) = (Tokens::U8(Vec::new()), Tokens::U8(Vec::new()));
    for (i, path) in paths.iter().enumerate() {
        let mut tokens = read_file(path, shape.vocab)?;
        let tail = tokens.split_tail((tokens.len() as f64 * fraction) as u64);
        if i == 0 {
            (all, tails) = (tokens, tail);
        } else {
            all.append(tokens);
            tails.append(tail);
        }
    }
    Ok((all, (fraction > 0.0).then_some(tails)))
}

fn read_file(path: &Path, vocab: u32) -> Result<Tokens, RunError> {
    let error = |what: String| RunError::Data { path: path.to_path_buf(), what };
    let bytes = std::fs::read(path).map_err(|e| error(format!("can't be read ({e})")))?;
    let width = token_bytes(path, vocab);
    if bytes.len() % width != 0 {
        return Err(error(format!("{} bytes are no whole number of {width}-byte tokens", bytes.len())));
    }
    let tokens = match width {
        1 => Tokens::U8(bytes),
        2 => Tokens::U16(bytes.as_chunks().0.iter().map(|&b| u16::from_le_bytes(b)).collect()),
        _ => Tokens::U32(bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect()),
    };
    match tokens.first_outside(vocab) {
        None => Ok(tokens),
        Some((i, token)) => Err(error(format!(
            "token {token} (number {i}, at byte {}) is outside the model's vocabulary of {vocab}",
            i * width as u64
        ))),
    }
}

/// Bytes of a token in a file, by its name. See the module's text.
fn token_bytes(path: &Path, vocab: u32) -> usize {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match () {
        () if name.ends_with(".u16.bin") => 2,
        () if name.ends_with(".u32.bin") => 4,
        () if name.ends_with(".bin") => 2 + 2 * usize::from(vocab > 1 << 16),
        () => 1,
    }
}

/// Where the sequences of a micro-batch start.
#[derive(Clone, Copy, Debug)]
enum Order {
    Sampled(Draws),
    InOrder,
}

/// Micro-batches of one purpose.
#[derive(Clone, Copy, Debug)]
pub struct Batches<'a> {
    tokens: &'a Tokens,
    shape: DataShape,
    order: Order,
}

impl<'a> Batches<'a> {
    /// Sampled with replacement by (seed, sequence).
    pub fn sampled(tokens: &'a Tokens, shape: DataShape, seed: u64) -> Self {
        Batches { tokens, shape, order: Order::Sampled(Draws::new(seed, "data")) }
    }

    /// From the first token on, each used once.
    pub fn in_order(tokens: &'a Tokens, shape: DataShape) -> Self {
        Batches { tokens, shape, order: Order::InOrder }
    }

    /// Whole micro-batches that the tokens hold in order.
    pub fn count(&self) -> u64 {
        (self.tokens.len() - 1) / (u64::from(self.shape.context) * u64::from(self.shape.microbatch))
    }

    /// Writes the ids of micro-batch `mb` into `out` `[microbatch, context]`: the inputs, or with `shift` 1 the targets.
    pub fn fill(&self, mb: u64, shift: u64, out: &mut [u32]) {
        let context = u64::from(self.shape.context);
        for (row, ids) in out.chunks_exact_mut(context as usize).enumerate() {
            let q = mb * u64::from(self.shape.microbatch) + row as u64;
            let start = match self.order {
                Order::Sampled(draws) => draws.at(q) % (self.tokens.len() - context),
                Order::InOrder => q * context,
            };
            self.tokens.copy(start + shift, ids);
        }
    }
}
