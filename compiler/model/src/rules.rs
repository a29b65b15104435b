//! How parameters are updated: which group each is in, and what its rule is.
//!
//! The groups of a spec take parameters in order, each what it selects and no group before it took; the last group takes the rest.

use crate::dims::Dims;
use crate::gpt::{ParamDecl, stage_graph};
use crate::kernel::{OptimizerKind, UpdateRule};
use artifact::optimizer::Correction;
use dsl::diag::Diagnostic;
pub use dsl::spec::{Clip, MuonScale};
use dsl::spec::{Group, Layer, Optimizer, ParamKind, Selector, Spec};

/// The rules of a model's updates.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// The last one selects nothing and takes the rest; there is at least that one.
    groups: Vec<GroupRule>,
    pub clip: Option<Clip>,
    /// By stage: whether backward passes meet newer weights than their forward passes; false beyond the list.
    drifts: Vec<bool>,
}

/// The rule of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupRule {
    selectors: Vec<Selector>,
    pub rule: UpdateRule,
    /// Of Muon's steps; others have none.
    pub scale: MuonScale,
}

impl GroupRule {
    pub fn new(selectors: Vec<Selector>, rule: UpdateRule, scale: MuonScale) -> Self {
        GroupRule { selectors, rule, scale }
    }
}

impl Rules {
    /// `rest` is for parameters that no group selects.
    pub fn new(mut groups: Vec<GroupRule>, rest: GroupRule, clip: Option<Clip>) -> Self {
        groups.push(GroupRule { selectors: Vec::new(), ..rest });
        Rules { groups, clip, drifts: Vec::new() }
    }

    /// The spec's: its groups, then its optimizer for the rest; with the spec's correction, if it has one.
    pub fn of_spec(spec: &Spec, correction: Option<&Correction>) -> Self {
        let group = |selectors: Vec<Selector>, optimizer: Optimizer| {
            let scale = match optimizer {
                Optimizer::Muon { scale, .. } => scale,
                _ => MuonScale::MatchAdamW,
            };
            let kind = self::optimizer(optimizer).kind();
            let correction = correction.and_then(|c| c.kind(kind));
            GroupRule::new(selectors, UpdateRule { correction, ..UpdateRule::plain(kind) }, scale)
        };
        let selectors = |g: &Group| g.selectors.iter().map(|s| s.value.clone()).collect();
        let groups = spec.groups.iter().map(|g| group(selectors(g), g.optimizer.value)).collect();
        let clip = spec.clip.as_ref().map(|clip| clip.value);
        let stages = correction.map_or(0, |c| c.by_stage()[0].len());
        let drifts = (0..stages).map(|s| correction.is_some_and(|c| c.acts_on(s))).collect();
        Rules { drifts, ..Self::new(groups, group(Vec::new(), spec.optimizer.value), clip) }
    }

    /// As they are on one stage.
    pub fn on_stage(&self, stage: usize) -> Self {
        let drift = self.drifts.get(stage).copied().unwrap_or(false);
        let group = |g: &GroupRule| GroupRule { rule: g.rule.where_it_acts(drift), ..g.clone() };
        Rules { groups: self.groups.iter().map(group).collect(), ..self.clone() }
    }

    /// One rule for all.
    pub fn uniform(rule: UpdateRule) -> Self {
        Self::new(Vec::new(), GroupRule::new(Vec::new(), rule, MuonScale::MatchAdamW), None)
    }

    /// Number of groups, the rest's counted.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Never: see [`Rules::groups`].
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Index of a parameter's group.
    pub fn group(&self, name: &str, shape: &[u64]) -> usize {
        let takes = |g: &GroupRule| g.selectors.iter().any(|s| selects(s, name, shape));
        self.groups.iter().position(takes).unwrap_or(self.groups.len() - 1)
    }

    /// The rule of a parameter.
    pub fn of(&self, name: &str, shape: &[u64]) -> &GroupRule {
        &self.groups[self.group(name, shape)]
    }

    /// Values that are kept beside each weight, rounded: of the embedding, of a block of this width, of the head.
    pub fn states(&self, width: u64) -> [usize; 3] {
        let square = [width.max(1); 2];
        let block = [("attn.qkv", [1, 3]), ("attn.out", [1, 1]), ("mlp.up", [1, 4]), ("mlp.down", [4, 1])];
        let block = block.map(|(name, by)| (format!("block.0.{name}.weight"), [by[0] * square[0], by[1] * square[1]]));
        let ends = ["embed.tok", "head.weight"].map(|name| [(name.to_owned(), square)]);
        [&ends[0][..], &block, &ends[1]].map(|weights| {
            let len = |shape: &[u64]| shape.iter().map(|&d| u128::from(d)).product::<u128>();
            let all: u128 = weights.iter().map(|(_, shape)| len(shape)).sum();
            let buffers = weights.iter().flat_map(|(name, shape)| self.of(name, shape).rule.buffers(shape));
            let kept: u128 = buffers.map(|(_, len)| u128::from(len)).sum();
            ((kept + all / 2) / all) as usize
        })
    }

    /// Whether some optimizer multiplies matrices in its updates.
    pub fn multiply(&self) -> bool {
        self.groups.iter().any(|g| for_matrices(g.rule.kind))
    }

    /// Why a parameter's update can't run in the kernel of its last weight gradient; none if it can.
    pub fn unfused(&self, name: &str, shape: &[u64]) -> Option<&'static str> {
        let clipped = self.clip.map(|clip| match clip {
            Clip::PerTensor { .. } => "clipping needs the norm of the whole gradient",
            Clip::PerStage { .. } => "clipping needs the norm of all of the stage's gradients",
            Clip::Global { .. } => "clipping needs the norm of all stages' gradients",
        });
        self.of(name, shape).rule.kind.unfused().or(clipped)
    }
}

/// The spec's optimizer as a bundle has it.
pub fn optimizer(asked: Optimizer) -> artifact::optimizer::Optimizer {
    use artifact::optimizer::Optimizer as Bundled;
    match asked {
        Optimizer::AdamW { beta1, beta2, eps, decay } => Bundled::AdamW { beta1, beta2, eps, decay },
        Optimizer::Sgd { momentum, decay } => Bundled::Sgd { momentum, decay },
        Optimizer::Lion { beta1, beta2, decay } => Bundled::Lion { beta1, beta2, decay },
        Optimizer::Signum { momentum, decay } => Bundled::Signum { momentum, decay },
        Optimizer::NAdam { beta1, beta2, eps, momentum_decay, decay } => {
            Bundled::NAdam { beta1, beta2, eps, momentum_decay, decay }
        }
        Optimizer::Adan { beta1, beta2, beta3, eps, decay } => Bundled::Adan { beta1, beta2, beta3, eps, decay },
        Optimizer::Muon { momentum, decay, .. } => Bundled::Muon { momentum, decay },
        Optimizer::NorMuon { momentum, beta2, decay } => Bundled::NorMuon { momentum, beta2, decay },
        Optimizer::Mars { beta1, beta2, eps, gamma, decay } => Bundled::Mars { beta1, beta2, eps, gamma, decay },
        Optimizer::Soap { beta1, beta2, eps, frequency, max_dim, decay } => {
            Bundled::Soap { beta1, beta2, eps, frequency, max_dim, decay }
        }
    }
}

/// What a parameter is.
pub fn kind(name: &str, shape: &[u64]) -> ParamKind {
    match name {
        _ if name.starts_with("embed.") => ParamKind::Embedding,
        "head.weight" => ParamKind::Head,
        _ if shape.len() >= 2 => ParamKind::Matrix,
        _ => ParamKind::Vector,
    }
}

fn selects(selector: &Selector, name: &str, shape: &[u64]) -> bool {
    match selector {
        Selector::Kind(wanted) => kind(name, shape) == *wanted,
        Selector::Pattern(pattern) => matches(pattern, name),
    }
}

/// Whether `name` is `pattern`, each `*` of which stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        // The earliest place leaves most for the parts that follow.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// All parameters of a model with their shapes.
pub fn parameters(dims: &Dims) -> Vec<ParamDecl> {
    let blocks = (0..dims.layers).map(Layer::Block);
    let layers: Vec<Layer> = std::iter::once(Layer::Embed).chain(blocks).chain([Layer::Head]).collect();
    stage_graph(dims, &layers, 1.0).expect("checked sizes give a well-shaped graph").params
}

/// `P0430`: a group that takes no parameter. `P0431`: an optimizer for matrices that gets something else. `params` are the model's.
pub fn check(spec: &Spec, rules: &Rules, params: &[ParamDecl]) -> Vec<Diagnostic> {
    let groups = &spec.groups;
    let mut found = Vec::new();
    let taken: Vec<usize> = params.iter().map(|p| rules.group(&p.name, &p.shape)).collect();
    for (i, group) in groups.iter().enumerate().filter(|(i, g)| !g.implied && !taken.contains(i)) {
        let selected = |p: &&ParamDecl| group.selectors.iter().any(|s| selects(&s.value, &p.name, &p.shape));
        found.push(match params.iter().find(selected) {
            Some(p) => shadowed(group, &groups[rules.group(&p.name, &p.shape).min(i)], &p.name),
            None => no_match(group, params),
        });
    }
    for (i, group) in rules.groups.iter().enumerate().filter(|(_, g)| for_matrices(g.rule.kind)) {
        let other = params.iter().zip(&taken).find(|(p, t)| **t == i && kind(&p.name, &p.shape) == ParamKind::Vector);
        if let Some((p, _)) = other {
            let span = groups.get(i).map_or(&spec.optimizer.span, |g| &g.optimizer.span);
            let name = group.rule.kind.name();
            let message = format!("`{name}` is for matrices, and `{}` is a vector", p.name);
            let error = Diagnostic::error("P0431", span.clone(), message);
            found.push(error.help("give vectors to another optimizer in a group before: `group vector = adamw { … }`"));
        }
    }
    found
}

fn for_matrices(kind: OptimizerKind) -> bool {
    matches!(kind, OptimizerKind::Muon | OptimizerKind::NorMuon | OptimizerKind::Soap { .. })
}

fn shadowed(group: &Group, by: &Group, name: &str) -> Diagnostic {
    let span = group.selectors[0].span.clone();
    let message = "all parameters of this group are in groups before it";
    Diagnostic::error("P0430", span, message)
        .and_at(by.selectors[0].span.clone(), format!("takes `{name}`"))
        .help("the first group that selects a parameter takes it: put the narrower group first")
}

fn no_match(group: &Group, params: &[ParamDecl]) -> Diagnostic {
    // Blocks have the same names but for their number.
    let names = params.iter().map(|p| p.name.as_str());
    let names: Vec<&str> = names.filter(|n| !n.starts_with("block.") || n.starts_with("block.0.")).collect();
    Diagnostic::error("P0430", group.selectors[0].span.clone(), "no parameter is in this group")
        .note(format!("there are {}, and the same in other blocks", names.join(", ")))
        .help("`*` stands for any characters: `block.*.attn.*`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("head.weight", "head.weight", true),
            ("head", "head.weight", false),
            ("block.*.attn.*", "block.11.attn.qkv.bias", true),
            ("block.*.attn.*", "block.1.mlp.up.bias", false),
            ("*.weight", "block.1.mlp.up.weight", true),
            ("*.weight", "block.1.mlp.up.weights", false),
            ("block.1*", "block.11.ln1.gain", true),
            ("*", "", true),
            ("a*a", "a", false),
            ("*aab", "aaab", true),
            ("*ab*ab", "abab", true),
            ("*ab*ab", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_first_group_takes() {
        let rule = |kind| UpdateRule::plain(kind);
        let group = |selector, kind| GroupRule::new(vec![selector], rule(kind), MuonScale::MatchAdamW);
        let groups = vec![
            group(Selector::Pattern("block.0.*".into()), OptimizerKind::Lion),
            group(Selector::Kind(ParamKind::Vector), OptimizerKind::Sgd),
        ];
        let rest = GroupRule::new(Vec::new(), rule(OptimizerKind::Muon), MuonScale::Original);
        let rules = Rules::new(groups, rest, None);
        assert_eq!(rules.group("block.0.ln1.gain", &[4]), 0);
        assert_eq!(rules.group("block.1.ln1.gain", &[4]), 1);
        assert_eq!(rules.group("head.weight", &[4, 5]), 2);
        assert_eq!(rules.of("head.weight", &[4, 5]).scale, MuonScale::Original);
        assert!(rules.unfused("head.weight", &[4, 5]).is_some() && rules.unfused("block.0.ln1.gain", &[4]).is_none());
    }
}
