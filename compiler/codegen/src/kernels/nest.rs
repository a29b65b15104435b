//! Loop nests over tensors: the skeleton around linalg operations on tiles, where the kernel itself decides the loops.

use super::math::Region;
use super::text::tensor;
use std::collections::BTreeSet;
use std::fmt::Write;

/// A tensor of f32 and the SSA value that holds it.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub shape: Vec<u64>,
}

impl Tensor {
    pub fn new(name: impl Into<String>, shape: &[u64]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }

    pub fn ty(&self) -> String {
        tensor(&self.shape, "f32")
    }
}

/// A map of a [`Nest::generic`] operand: the iterators that index it, e.g. `"ij"`, `"j"`, `"ji"`.
pub type Map = &'static str;

/// Text in the making. All names are made here, so none is defined twice.
#[derive(Default)]
pub struct Nest {
    text: String,
    constants: BTreeSet<u64>,
    next: u32,
}

impl Nest {
    /// The text, constants first.
    pub fn finish(self) -> String {
        let mut text = String::new();
        for c in self.constants {
            writeln!(text, "%c{c} = arith.constant {c} : index").expect("writing to a String");
        }
        text + &self.text
    }

    fn fresh(&mut self, base: &str) -> String {
        self.next += 1;
        format!("{base}_{}", self.next)
    }

    pub fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// A value defined by `text`.
    pub fn op(&mut self, base: &str, text: &str) -> String {
        let name = format!("%{}", self.fresh(base));
        self.line(&format!("{name} = {text}"));
        name
    }

    /// An index constant.
    pub fn index(&mut self, value: u64) -> String {
        self.constants.insert(value);
        format!("%c{value}")
    }

    /// `from`, `from + step` … below `to`, carrying tensors. `body` gets the index and what is carried, and gives what is carried on.
    pub fn repeat(
        &mut self,
        (from, to, step): (&str, &str, u64),
        carried: &[&Tensor],
        body: impl FnOnce(&mut Self, &str, Vec<Tensor>) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        let step = self.index(step);
        let (at, done) = (format!("%{}", self.fresh("at")), format!("%{}", self.fresh("done")));
        let inside: Vec<_> =
            carried.iter().map(|t| Tensor::new(format!("%{}", self.fresh("so_far")), &t.shape)).collect();
        let pairs = inside.iter().zip(carried).map(|(i, o)| format!("{} = {}", i.name, o.name));
        let pairs = pairs.collect::<Vec<_>>().join(", ");
        let types = carried.iter().map(|t| t.ty()).collect::<Vec<_>>().join(", ");
        let n = carried.len();
        self.line(&format!(
            "{done}:{n} = scf.for {at} = {from} to {to} step {step} iter_args({pairs}) -> ({types}) {{"
        ));
        let carried_on = body(self, &at, inside);
        let names = carried_on.iter().map(|t| t.name.clone()).collect::<Vec<_>>().join(", ");
        self.line(&format!("scf.yield {names} : {types}\n}}"));
        carried.iter().enumerate().map(|(i, t)| Tensor::new(format!("{done}#{i}"), &t.shape)).collect()
    }

    pub fn empty(&mut self, shape: &[u64]) -> Tensor {
        let name = self.op("empty", &format!("tensor.empty() : {}", tensor(shape, "f32")));
        Tensor::new(name, shape)
    }

    /// Memory of its own: equal tensors that are filled and then written would otherwise be made one, and copied.
    pub fn memory(&mut self, shape: &[u64]) -> Tensor {
        let name = self.op("memory", &format!("bufferization.alloc_tensor() : {}", tensor(shape, "f32")));
        Tensor::new(name, shape)
    }

    pub fn empty_like(&mut self, other: &Tensor) -> Tensor {
        self.empty(&other.shape)
    }

    /// The part of `whole` at `offsets`, of `sizes`; its shape is the last dimensions of `sizes`, `rank` of them (the others are 1).
    pub fn cut(&mut self, whole: &Tensor, offsets: &[&str], sizes: &[u64], rank: usize) -> Tensor {
        let shape = &sizes[sizes.len() - rank..];
        let text = format!(
            "tensor.extract_slice {}{} : {} to {}",
            whole.name,
            place(offsets, sizes),
            whole.ty(),
            tensor(shape, "f32")
        );
        Tensor::new(self.op("part", &text), shape)
    }

    /// `whole` with `part` in the place that [`Nest::cut`] took it from.
    pub fn put(&mut self, part: &Tensor, whole: &Tensor, offsets: &[&str], sizes: &[u64]) -> Tensor {
        let text = format!(
            "tensor.insert_slice {} into {}{} : {} into {}",
            part.name,
            whole.name,
            place(offsets, sizes),
            part.ty(),
            whole.ty()
        );
        Tensor::new(self.op("with", &text), &whole.shape)
    }

    /// A `linalg.generic` into `out`. `iterators` has a letter for each of i, j, …: `p`arallel or `r`eduction; `mark` names a unit attribute
    /// for the strategy to match. `body` gets the operands' elements (the old one of `out` last) and gives the new one.
    pub fn generic(
        &mut self,
        mark: &str,
        iterators: &str,
        ins: &[(&Tensor, Map)],
        out: (&Tensor, Map),
        body: impl FnOnce(&mut Region, &[String]) -> String,
    ) -> Tensor {
        let letters = &"ijk"[..iterators.len()];
        let commas = |s: &str| s.chars().map(String::from).collect::<Vec<_>>().join(", ");
        let maps = ins.iter().chain([&out]).map(|o| format!("affine_map<({}) -> ({})>", commas(letters), commas(o.1)));
        let maps = maps.collect::<Vec<_>>().join(", ");
        let kinds = iterators.chars().map(|c| if c == 'p' { "\"parallel\"" } else { "\"reduction\"" });
        let kinds = kinds.collect::<Vec<_>>().join(", ");
        let elements: Vec<_> = (0..=ins.len()).map(|_| format!("%{}", self.fresh("el"))).collect();
        let args = elements.iter().map(|e| format!("{e}: f32")).collect::<Vec<_>>().join(", ");
        let operands = if ins.is_empty() {
            String::new()
        } else {
            let names = ins.iter().map(|o| o.0.name.clone()).collect::<Vec<_>>().join(", ");
            let types = ins.iter().map(|o| o.0.ty()).collect::<Vec<_>>().join(", ");
            format!("ins({names} : {types}) ")
        };
        let mut region = Region::new(&format!("{}_", self.fresh("v")));
        let result = body(&mut region, &elements);
        let ty = out.0.ty();
        let text = format!(
            "linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}} {operands}outs({} : {ty}) attrs = {{{mark}}} {{\n\
             ^bb0({args}):\n{}linalg.yield {result} : f32\n}} -> {ty}",
            out.0.name,
            region.finish(),
        );
        Tensor::new(self.op("tile", &text), &out.0.shape)
    }
}

fn place(offsets: &[&str], sizes: &[u64]) -> String {
    let sizes_text = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    format!("[{}] [{sizes_text}] [{}]", offsets.join(", "), vec!["1"; sizes.len()].join(", "))
}
