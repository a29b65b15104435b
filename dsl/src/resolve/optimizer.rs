//! `optimizer = adamw { lr = cosine(1e-3, warmup = 20, total = 400), betas = (0.9, 0.95), decay = 0.1 }`

use super::group::{self, split};
use super::rate::learning_rate;
use super::section::{Keys, Section, assigned};
use super::{Context, not_yet};
use crate::ast::{Body, Entry, Name, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::spec::{At, Clip, Group, LearningRate, MuonScale, Optimizer};
use crate::suggest::{either, nearest};

/// An optimizer's name, its keys, and how its braces are read.
struct Known {
    name: &'static str,
    keys: Keys,
    read: fn(&mut Context, &Section<'_>) -> Option<Optimizer>,
    /// Learning rate of one that names none.
    lr: Option<f64>,
}

const LATER_KEYS: &[&str] = &["error_feedback", "correction", "dtype"];

const KNOWN: [Known; 10] = [
    Known::new(
        "adamw",
        &["lr", "betas", "eps", "decay"],
        &["error_feedback", "correction", "amsgrad", "dtype"],
        adamw,
        Some(1e-3),
    ),
    Known::new("sgd", &["lr", "momentum", "decay"], &["error_feedback", "correction", "nesterov", "dtype"], sgd, None),
    Known::new("lion", &["lr", "betas", "decay"], LATER_KEYS, lion, Some(1e-4)),
    Known::new("signum", &["lr", "momentum", "decay"], LATER_KEYS, signum, Some(1e-4)),
    Known::new("nadam", &["lr", "betas", "eps", "momentum_decay", "decay"], LATER_KEYS, nadam, Some(1e-3)),
    Known::new("adan", &["lr", "betas", "eps", "decay"], LATER_KEYS, adan, Some(1e-3)),
    Known::new("muon", &["lr", "momentum", "scale", "decay"], LATER_KEYS, muon, Some(1e-3)),
    Known::new("normuon", &["lr", "betas", "decay"], LATER_KEYS, normuon, Some(1e-3)),
    Known::new("mars", &["lr", "betas", "eps", "gamma", "decay"], LATER_KEYS, mars, Some(3e-3)),
    Known::new("soap", &["lr", "betas", "eps", "frequency", "max_dim", "decay"], LATER_KEYS, soap, Some(3e-3)),
];
/// Optimizers of the design that are not built.
const LATER: [&str; 3] = ["adam", "adafactor", "lamb"];

impl Known {
    const fn new(
        name: &'static str,
        known: &'static [&'static str],
        later: &'static [&'static str],
        read: fn(&mut Context, &Section<'_>) -> Option<Optimizer>,
        lr: Option<f64>,
    ) -> Self {
        Self { name, keys: Keys { block: name, known, later }, read, lr }
    }
}

pub(super) const ADAMW_DEFAULT: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 };
const RATE_DEFAULT: LearningRate = LearningRate::Constant { lr: 1e-3 };

/// The optimizer of the file: how every parameter is updated.
pub(super) struct Found {
    pub optimizer: At<Optimizer>,
    pub learning_rate: At<LearningRate>,
    pub groups: Vec<Group>,
    pub clip: Option<At<Clip>>,
}

/// Without an entry: AdamW with its defaults.
pub(super) fn optimizer(cx: &mut Context, entry: Option<&Entry>) -> Option<Found> {
    let Some(entry) = entry else {
        let optimizer = At { value: ADAMW_DEFAULT, span: 0..0 };
        let learning_rate = At { value: RATE_DEFAULT, span: 0..0 };
        return Some(Found { optimizer, learning_rate, groups: Vec::new(), clip: None });
    };
    let value = assigned(cx, entry)?;
    let parts = split(value);
    let rule = rule(cx, &parts.own, "optimizer", None);
    let clip = group::clip(cx, &parts.clip);
    let groups = group::groups(cx, &parts.groups, rule.as_ref());
    let (optimizer, learning_rate) = rule?;
    Some(Found { groups: groups?, clip: clip?, optimizer, learning_rate })
}

/// One optimizer and its learning rate. `inherited`: the rate where it names none, in a group.
pub(super) fn rule(
    cx: &mut Context,
    value: &Value,
    key: &str,
    inherited: Option<&At<LearningRate>>,
) -> Option<(At<Optimizer>, At<LearningRate>)> {
    let empty = Body { entries: Vec::new(), span: value.span.clone(), broken: false };
    let (name, body) = match &value.kind {
        ValueKind::Word(word) => (Name { text: word.clone(), span: value.span.clone() }, &empty),
        ValueKind::Record(Some(name), body) => (name.clone(), body),
        ValueKind::Invalid => return None,
        other => {
            let message = format!("`{key}` is `adamw {{ … }}` or another optimizer, not {}", other.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help(format!("write e.g. `{key} = adamw {{ lr = 1e-3 }}`")));
            return None;
        }
    };
    let names = KNOWN.map(|k| k.name);
    let Some(known) = KNOWN.into_iter().find(|k| k.name == name.text) else {
        let help = format!("use {}", either(&names));
        if LATER.contains(&name.text.as_str()) {
            not_yet(cx, &name.span, &format!("the optimizer `{}`", name.text), &help);
        } else {
            let found = Diagnostic::error("P0210", name.span.clone(), format!("there is no optimizer `{}`", name.text));
            let meant = nearest(&name.text, names).map(|meant| format!("did you mean `{meant}`?"));
            cx.report(found.help(meant.unwrap_or(help)));
        }
        return None;
    };
    let section = Section::new(cx, known.name, &name.span, body, &known.keys);
    let rate = match (section.find("lr"), known.lr) {
        (Some(entry), _) => assigned(cx, entry).and_then(|v| learning_rate(cx, v)),
        (None, _) if inherited.is_some() => inherited.cloned(),
        (None, Some(lr)) => Some(At { value: LearningRate::Constant { lr }, span: section.start.clone() }),
        (None, None) => {
            section.missing(cx, "lr", "lr = 0.1");
            None
        }
    };
    let read = (known.read)(cx, &section);
    Some((At { value: read?, span: value.span.clone() }, rate?))
}

fn adamw(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let betas = betas(cx, section, [0.9, 0.95]);
    let (eps, decay) = (eps(cx, section), unit_share(cx, section, "decay", 0.1));
    let [beta1, beta2] = betas?;
    Some(Optimizer::AdamW { beta1, beta2, eps: eps?, decay: decay? })
}

fn sgd(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let (momentum, decay) = (unit_share(cx, section, "momentum", 0.0), unit_share(cx, section, "decay", 0.0));
    Some(Optimizer::Sgd { momentum: momentum?, decay: decay? })
}

fn lion(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let (betas, decay) = (betas(cx, section, [0.9, 0.99]), unit_share(cx, section, "decay", 0.1));
    let [beta1, beta2] = betas?;
    Some(Optimizer::Lion { beta1, beta2, decay: decay? })
}

fn signum(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let (momentum, decay) = (unit_share(cx, section, "momentum", 0.9), unit_share(cx, section, "decay", 0.0));
    Some(Optimizer::Signum { momentum: momentum?, decay: decay? })
}

fn nadam(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let betas = betas(cx, section, [0.9, 0.999]);
    let momentum_decay = match section.value(cx, "momentum_decay") {
        Some(v) => cx.real(v, "momentum_decay", "from 0 to 1", |x| (0.0..=1.0).contains(&x)).map(|at| at.value),
        None => Some(0.004),
    };
    let (eps, decay) = (eps(cx, section), unit_share(cx, section, "decay", 0.1));
    let [beta1, beta2] = betas?;
    Some(Optimizer::NAdam { beta1, beta2, eps: eps?, momentum_decay: momentum_decay?, decay: decay? })
}

fn adan(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let betas = betas(cx, section, [0.98, 0.92, 0.99]);
    let (eps, decay) = (eps(cx, section), unit_share(cx, section, "decay", 0.02));
    let [beta1, beta2, beta3] = betas?;
    Some(Optimizer::Adan { beta1, beta2, beta3, eps: eps?, decay: decay? })
}

fn muon(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let (momentum, decay) = (unit_share(cx, section, "momentum", 0.95), unit_share(cx, section, "decay", 0.1));
    let scale = match section.value(cx, "scale") {
        Some(value) => match cx.word(value, "scale", &["match_adamw", "original"], &[])? {
            "original" => MuonScale::Original,
            _ => MuonScale::MatchAdamW,
        },
        None => MuonScale::MatchAdamW,
    };
    Some(Optimizer::Muon { momentum: momentum?, scale, decay: decay? })
}

fn normuon(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let (betas, decay) = (betas(cx, section, [0.95, 0.95]), unit_share(cx, section, "decay", 0.1));
    let [momentum, beta2] = betas?;
    Some(Optimizer::NorMuon { momentum, beta2, decay: decay? })
}

fn mars(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let betas = betas(cx, section, [0.95, 0.99]);
    let gamma = match section.value(cx, "gamma") {
        Some(v) => cx.real(v, "gamma", "from 0 to 1", |x| (0.0..=1.0).contains(&x)).map(|at| at.value),
        None => Some(0.025),
    };
    let (eps, decay) = (eps(cx, section), unit_share(cx, section, "decay", 0.01));
    let [beta1, beta2] = betas?;
    Some(Optimizer::Mars { beta1, beta2, eps: eps?, gamma: gamma?, decay: decay? })
}

fn soap(cx: &mut Context, section: &Section<'_>) -> Option<Optimizer> {
    let betas = betas(cx, section, [0.95, 0.95]);
    let mut whole = |key, default| match section.value(cx, key) {
        Some(value) => cx.count32(value, key, 1..=1_000_000).map(|at| at.value),
        None => Some(default),
    };
    let (frequency, max_dim) = (whole("frequency", 10), whole("max_dim", 10_000));
    let (eps, decay) = (eps(cx, section), unit_share(cx, section, "decay", 0.01));
    let [beta1, beta2] = betas?;
    let (frequency, max_dim) = (frequency?.into(), max_dim?);
    Some(Optimizer::Soap { beta1, beta2, eps: eps?, frequency, max_dim, decay: decay? })
}

fn eps(cx: &mut Context, section: &Section<'_>) -> Option<f64> {
    let Some(value) = section.value(cx, "eps") else { return Some(1e-8) };
    cx.real(value, "eps", "above 0, up to 1", |x| x > 0.0 && x <= 1.0).map(|at| at.value)
}

/// A number from 0 to below 1.
fn unit_share(cx: &mut Context, section: &Section<'_>, key: &str, default: f64) -> Option<f64> {
    let Some(value) = section.value(cx, key) else { return Some(default) };
    cx.real(value, key, "from 0 to below 1", |x| (0.0..1.0).contains(&x)).map(|at| at.value)
}

/// `betas = (0.9, 0.95)`: as many numbers as there are defaults.
fn betas<const N: usize>(cx: &mut Context, section: &Section<'_>, default: [f64; N]) -> Option<[f64; N]> {
    let Some(value) = section.value(cx, "betas") else { return Some(default) };
    let form = if N == 2 { "a pair" } else { "three numbers" };
    let message = match &value.kind {
        ValueKind::Tuple(items) if items.len() == N => {
            let mut beta =
                |v: &Value| cx.real(v, "betas", "from 0 to below 1", |x| (0.0..1.0).contains(&x)).map(|at| at.value);
            let found: Vec<Option<f64>> = items.iter().map(&mut beta).collect();
            let found: Option<Vec<f64>> = found.into_iter().collect();
            return found?.try_into().ok();
        }
        ValueKind::Invalid => return None,
        ValueKind::Tuple(items) => format!("`betas` is {form}, not {} numbers", items.len()),
        other => format!("`betas` is {form}, not {}", other.describe()),
    };
    let example = default.map(|beta| beta.to_string()).join(", ");
    let found = Diagnostic::error("P0207", value.span.clone(), message);
    cx.report(found.help(format!("write `betas = ({example})`")));
    None
}
