//! `partition`: every layer on exactly one stage, in order, and a stage for every rank.

use super::Context;
use super::pipeline::Outer;
use super::section::Section;
use crate::ast::{Name, Number, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::spec::{At, Layer, Model, Partition};
use crate::suggest::nearest;
use std::ops::Range;

/// Where the layers of a model with `blocks` blocks stand: `embed` 0, `block i` 1 + i, `head` 1 + blocks.
struct Line {
    blocks: u32,
}

/// Layers named together, as positions on the line, with their place in the text.
struct Piece {
    at: Range<u32>,
    span: Span,
}

pub(super) fn partition(cx: &mut Context, section: &Section<'_>, outer: &Outer<'_>) -> Option<At<Partition>> {
    let Some(value) = section.value(cx, "partition") else {
        let found = At { value: Partition::Balanced, span: section.start.clone() };
        return section.find("partition").is_none().then(|| balanced(cx, found, outer));
    };
    let ValueKind::List(stages) = &value.kind else {
        cx.word(value, "partition", &["balanced"], &["measured", "searched", "even"])?;
        return Some(balanced(cx, At { value: Partition::Balanced, span: value.span.clone() }, outer));
    };
    let Some(model) = outer.model else {
        let found = Diagnostic::error("P0223", value.span.clone(), "there is no model whose layers could be placed");
        cx.report(found.help("add a `model` block, or leave `partition` out"));
        return None;
    };
    explicit(cx, value, stages, model?, outer)
}

/// A balanced partition has a block for every stage.
fn balanced(cx: &mut Context, partition: At<Partition>, outer: &Outer<'_>) -> At<Partition> {
    if let (Some(Some(model)), Some(ranks)) = (outer.model, outer.ranks)
        && model.layers.value < ranks.value * outer.chunks
    {
        let (layers, stages) = (model.layers.value, ranks.value * outer.chunks);
        let message = format!("{layers} layers can't fill {stages} stages");
        let found = Diagnostic::error("P0222", model.layers.span.clone(), message)
            .and_at(
                ranks.span.clone(),
                match outer.chunks {
                    1 => "a stage for each of these".into(),
                    n => format!("{n} stages for each of these"),
                },
            )
            .note("a balanced partition gives every stage at least one block");
        cx.report(found.help(match layers / outer.chunks {
            0 => format!("use at least {stages} layers, or an explicit partition"),
            most => format!("use at most {most} ranks, at least {stages} layers, or an explicit partition"),
        }));
    }
    partition
}

fn explicit(
    cx: &mut Context,
    value: &Value,
    stages: &[Value],
    model: &Model,
    outer: &Outer<'_>,
) -> Option<At<Partition>> {
    let line = Line { blocks: model.layers.value };
    let mut fine = true;
    let mut pieces: Vec<Vec<Piece>> = Vec::new();
    for stage in stages {
        let ValueKind::List(items) = &stage.kind else {
            let message = format!("a stage is a list of layers, not {}", stage.kind.describe());
            let found = Diagnostic::error("P0207", stage.span.clone(), message);
            cx.report(found.help("write each stage in brackets: `[[embed, block 0..4], [block 4..8, head]]`"));
            fine = false;
            continue;
        };
        if items.is_empty() {
            let found = Diagnostic::error("P0222", stage.span.clone(), "this stage has no layers");
            cx.report(found.help("give it a layer, or remove it and use fewer ranks"));
            fine = false;
        }
        let read: Vec<Option<Piece>> = items.iter().map(|item| piece(cx, item, &line)).collect();
        fine &= read.iter().all(Option::is_some);
        pieces.push(read.into_iter().flatten().collect());
    }
    if fine {
        let flat: Vec<&Piece> = pieces.iter().flatten().collect();
        fine = covers(cx, value, &line, &flat);
    }
    if let Some(ranks) = outer.ranks
        && stages.len() != ranks.value as usize * outer.chunks as usize
    {
        let needed = ranks.value as usize * outer.chunks as usize;
        let of = if outer.chunks == 1 { String::new() } else { format!(" of {} stages", outer.chunks) };
        let message = format!("the partition has {} stages for {} ranks{of}", stages.len(), ranks.value);
        let found = Diagnostic::error("P0221", value.span.clone(), message).and_at(ranks.span.clone(), "the ranks");
        cx.report(match stages.len() {
            n if n > 0 && outer.chunks == 1 => found.help(format!("write {needed} stages, or set `ranks = {n}`")),
            _ => found.help(format!("write {needed} stages")),
        });
        fine = false;
    }
    if fine {
        uneven(cx, value, &line, &pieces);
    }
    let layers = pieces.iter().map(|stage| stage.iter().flat_map(|p| p.at.clone()).map(|at| line.layer(at)).collect());
    fine.then(|| At { value: Partition::Explicit(layers.collect()), span: value.span.clone() })
}

/// Lint for a stage with more than one and a half times the blocks of an even cut.
fn uneven(cx: &mut Context, value: &Value, line: &Line, pieces: &[Vec<Piece>]) {
    let is_block = |at: &u32| (1..=line.blocks).contains(at);
    let blocks = |stage: &Vec<Piece>| stage.iter().flat_map(|piece| piece.at.clone()).filter(is_block).count();
    let share = (line.blocks as usize).div_ceil(pieces.len().max(1));
    let Some((stage, most)) = pieces.iter().map(blocks).enumerate().rev().max_by_key(|(_, most)| *most) else { return };
    if 2 * most > 3 * share {
        let message =
            format!("stage {stage} has {most} of {} blocks, an even cut gives none more than {share}", line.blocks);
        let found = Diagnostic::lint("P0226", value.span.clone(), message);
        cx.report(found.help("use `partition = balanced`, or move blocks to the other stages"));
    }
}

/// `embed`, `head`, `block 3`, `block 0..2`
fn piece(cx: &mut Context, value: &Value, line: &Line) -> Option<Piece> {
    let at = match &value.kind {
        ValueKind::Word(word) if word == "embed" => 0..1,
        ValueKind::Word(word) if word == "head" => line.blocks + 1..line.blocks + 2,
        ValueKind::Indexed(name, from, to) if name.text == "block" => blocks(cx, value, from, to.as_ref(), line)?,
        ValueKind::Word(name) | ValueKind::Indexed(Name { text: name, .. }, ..) => {
            let found = Diagnostic::error("P0210", value.span.clone(), format!("there is no layer `{name}`"));
            cx.report(match nearest(name, ["embed", "block", "head"]) {
                Some("block") => found.help("write `block 3`, or `block 0..2` for 0 and 1"),
                Some(meant) => found.help(format!("did you mean `{meant}`?")),
                None => found.help("layers are `embed`, `block 0` and so on, and `head`"),
            });
            return None;
        }
        other => {
            let message = format!("a layer is `embed`, `block …` or `head`, not {}", other.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help("write e.g. `[embed, block 0..2]`"));
            return None;
        }
    };
    Some(Piece { at, span: value.span.clone() })
}

/// Positions of `block from..to`.
fn blocks(cx: &mut Context, value: &Value, from: &Number, to: Option<&Number>, line: &Line) -> Option<Range<u32>> {
    let index = |number: &Number| number.whole.and_then(|n| u32::try_from(n).ok()).filter(|n| *n <= line.blocks);
    let first = index(from);
    let end = match to {
        Some(to) => index(to),
        None => first.map(|n| n + 1).filter(|n| *n <= line.blocks),
    };
    match (first, end) {
        (Some(first), Some(end)) if first < end => Some(1 + first..1 + end),
        (Some(first), Some(end)) => {
            let found = Diagnostic::error("P0208", value.span.clone(), format!("`block {first}..{end}` is empty"));
            cx.report(found.help("the end is not included: `block 0..2` is 0 and 1"));
            None
        }
        _ => {
            let message = format!("the model has blocks 0 to {} only", line.blocks - 1);
            let found = Diagnostic::error("P0208", value.span.clone(), message);
            cx.report(found.help(format!("all blocks: `block 0..{}`", line.blocks)));
            None
        }
    }
}

/// Whether every layer is there once and in order.
fn covers(cx: &mut Context, value: &Value, line: &Line, pieces: &[&Piece]) -> bool {
    let before = cx.found.len();
    let mut seen: Vec<Option<&Piece>> = vec![None; line.blocks as usize + 2];
    for piece in pieces {
        let earlier = piece.at.clone().find_map(|at| seen[at as usize].map(|p| (at, p)));
        if let Some((at, first)) = earlier {
            let message = format!("the partition places {} twice", line.name(&(at..at + 1)));
            let found = Diagnostic::error("P0220", piece.span.clone(), message);
            cx.report(found.and_at(first.span.clone(), "first here").help("place every layer on one stage"));
        }
        for at in piece.at.clone() {
            seen[at as usize] = Some(piece);
        }
    }
    let missing = runs(&seen);
    if !missing.is_empty() {
        let names: Vec<String> = missing.iter().map(|run| line.name(run)).collect();
        let message = format!("the partition leaves out {}", names.join(", "));
        let found = Diagnostic::error("P0220", value.span.clone(), message);
        let found = found.note("layers that no stage holds would be dropped from the model");
        let last = missing.last().map_or(0, |run| run.end);
        cx.report(match &missing[..] {
            [_] if (last as usize) < seen.len() => {
                found.help(format!("add {} before {}", names[0], line.name(&(last..last + 1))))
            }
            [run] if run.start > 0 => {
                found.help(format!("add {} after {}", names[0], line.name(&(run.start - 1..run.start))))
            }
            _ => found.help(format!("the whole model: `embed`, `block 0..{}`, `head`", line.blocks)),
        });
    }
    if cx.found.len() > before {
        return false;
    }
    let mut next = 0;
    for piece in pieces {
        if piece.at.start != next {
            let (has, wants) = (line.name(&piece.at), line.name(&(next..next + 1)));
            let message = format!("the partition has {has} where {wants} belongs");
            let found = Diagnostic::error("P0220", piece.span.clone(), message);
            cx.report(found.help("write the layers in the order of the forward pass: `embed`, the blocks, `head`"));
            return false;
        }
        next = piece.at.end;
    }
    true
}

/// The runs of positions that no piece covers.
fn runs(seen: &[Option<&Piece>]) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    let ends = |at: u32| at == 1 || at as usize == seen.len() - 1;
    for (at, _) in seen.iter().enumerate().filter(|(_, piece)| piece.is_none()) {
        let at = at as u32;
        match runs.last_mut() {
            // `embed`, the blocks and `head` are named apart.
            Some(run) if run.end == at && !ends(at) => run.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

impl Line {
    fn layer(&self, at: u32) -> Layer {
        match at {
            0 => Layer::Embed,
            at if at > self.blocks => Layer::Head,
            at => Layer::Block(at - 1),
        }
    }

    /// As it is written; `run` does not cross the ends of the blocks.
    fn name(&self, run: &Range<u32>) -> String {
        match self.layer(run.start) {
            Layer::Embed => "`embed`".into(),
            Layer::Head => "`head`".into(),
            Layer::Block(first) if run.len() == 1 => format!("`block {first}`"),
            Layer::Block(first) => format!("`block {first}..{}`", first + run.len() as u32),
        }
    }
}
