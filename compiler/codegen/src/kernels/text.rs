//! Writes the function around a kernel's linalg: arguments, tensors for them, results written back.

use std::fmt::Write;

/// A tensor type such as `tensor<8x32xf32>`.
pub fn tensor(shape: &[u64], element: &str) -> String {
    format!("tensor<{}>", shaped(shape, element))
}

/// A memref type such as `memref<8x32xf32>`.
pub fn memref(shape: &[u64], element: &str) -> String {
    format!("memref<{}>", shaped(shape, element))
}

fn shaped(shape: &[u64], element: &str) -> String {
    let mut text = String::new();
    for dim in shape {
        write!(text, "{dim}x").expect("writing to a String");
    }
    text + element
}

/// The identity map of a rank, `affine_map<(d0, d1) -> (d0, d1)>`.
pub fn identity_map(rank: usize) -> String {
    let dims = (0..rank).map(|d| format!("d{d}")).collect::<Vec<_>>().join(", ");
    format!("affine_map<({dims}) -> ({dims})>")
}

/// `["parallel", "parallel"]`
pub fn parallel(rank: usize) -> String {
    format!("[{}]", vec!["\"parallel\""; rank].join(", "))
}

/// A `func.func` in the making. Operand `x` is the memref `%x_ref` and, unless it is taken as a memref only, the tensor `%x`.
/// Operands are declared in the order of [`model::kernel`].
pub struct Func {
    name: String,
    args: Vec<String>,
    head: String,
    body: String,
    tail: String,
    types: Vec<(String, Vec<u64>, String)>,
}

impl Func {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            args: Vec::new(),
            head: String::new(),
            body: String::new(),
            tail: String::new(),
            types: Vec::new(),
        }
    }

    /// An operand that is only read; gives the tensor's name.
    pub fn input(&mut self, name: &str, shape: &[u64], element: &str) -> String {
        self.declare(name, shape, element, "restrict")
    }

    /// An operand that is written (and read, if the kernel's linalg does); gives the tensor's name. Write it back with [`Func::result`].
    pub fn output(&mut self, name: &str, shape: &[u64], element: &str) -> String {
        self.declare(name, shape, element, "restrict writable")
    }

    /// An operand that stays a memref (to be read by `memref.load`); gives the memref's name.
    pub fn buffer(&mut self, name: &str, shape: &[u64], element: &str) -> String {
        self.args.push(format!("%{name}_ref: {}", memref(shape, element)));
        format!("%{name}_ref")
    }

    fn declare(&mut self, name: &str, shape: &[u64], element: &str, how: &str) -> String {
        let (from, to) = (memref(shape, element), tensor(shape, element));
        let buffer = self.buffer(name, shape, element);
        self.types.push((name.into(), shape.to_vec(), element.into()));
        writeln!(self.head, "  %{name} = bufferization.to_tensor {buffer} {how} : {from} to {to}")
            .expect("writing to a String");
        format!("%{name}")
    }

    /// Adds text (one or more lines) to the body.
    pub fn push(&mut self, text: &str) {
        for line in text.lines() {
            self.body.push_str("  ");
            self.body.push_str(line);
            self.body.push('\n');
        }
    }

    /// Writes `value` back to the operand `name` at the end.
    pub fn result(&mut self, name: &str, value: &str) {
        let (_, shape, element) = self.types.iter().find(|t| t.0 == name).expect("an operand that was declared");
        let (t, m) = (tensor(shape, element), memref(shape, element));
        writeln!(
            self.tail,
            "  bufferization.materialize_in_destination {value} in restrict writable %{name}_ref : ({t}, {m}) -> ()"
        )
        .expect("writing to a String");
    }

    /// The whole function.
    pub fn finish(self) -> String {
        let Self { name, args, head, body, tail, .. } = self;
        format!("func.func @{name}({}) {{\n{head}{body}{tail}  return\n}}\n", args.join(", "))
    }
}
