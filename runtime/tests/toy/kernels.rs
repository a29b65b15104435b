//! The toy's kernels, in the compiled kernels' calling convention.

use super::{ROWS, VOCAB, WIDTH};
use artifact::program::{HYPER_LEN, KernelEntry};
use runtime::KernelFn;

pub const EMBED: u32 = 0;
pub const LAYER: u32 = 1;
pub const LOSS: u32 = 2;
pub const INPUT_GRADIENT: u32 = 3;
pub const GRADIENT_STORE: u32 = 4;
pub const GRADIENT_ADD: u32 = 5;
pub const GRADIENT_UPDATE: u32 = 6;
pub const GRADIENT_UPDATE_ALONE: u32 = 7;

/// Those that compute weight gradients.
pub const GRADIENTS: [usize; 4] = [4, 5, 6, 7];

pub fn table() -> Vec<Option<KernelFn>> {
    let functions: [KernelFn; 8] =
        [embed, layer, loss, input_gradient, gradient_store, gradient_add, gradient_update, gradient_update_alone];
    functions.into_iter().map(Some).collect()
}

pub fn entries() -> Vec<KernelEntry> {
    let all = [
        ("embed", 2),
        ("layer", 3),
        ("loss", 3),
        ("input_gradient", 3),
        ("gradient_store", 3),
        ("gradient_add", 3),
        ("gradient_update", 6),
        ("gradient_update_alone", 5),
    ];
    all.map(|(name, args)| KernelEntry { name: name.into(), args, ..KernelEntry::default() }).into()
}

/// Argument `i` as a slice.
unsafe fn arg<'a, T>(args: *const *mut u8, i: usize, len: usize) -> &'a mut [T] {
    unsafe { std::slice::from_raw_parts_mut((*args.add(i)).cast(), len) }
}

const X: usize = ROWS * WIDTH;

/// tokens -> x
unsafe extern "C-unwind" fn embed(a: *const *mut u8) {
    let (tokens, x) = unsafe { (arg::<u32>(a, 0, ROWS), arg::<f32>(a, 1, X)) };
    for (i, x) in x.iter_mut().enumerate() {
        *x = tokens[i / WIDTH] as f32 / VOCAB as f32 + (i % WIDTH) as f32 / 8.0;
    }
}

/// x, w -> y
unsafe extern "C-unwind" fn layer(a: *const *mut u8) {
    let (x, w, y) = unsafe { (arg::<f32>(a, 0, X), arg::<f32>(a, 1, WIDTH), arg::<f32>(a, 2, X)) };
    for (i, y) in y.iter_mut().enumerate() {
        *y = x[i] + x[i] * w[i % WIDTH];
    }
}

/// targets, y (becomes dy) -> loss
unsafe extern "C-unwind" fn loss(a: *const *mut u8) {
    let (targets, y, loss) = unsafe { (arg::<u32>(a, 0, ROWS), arg::<f32>(a, 1, X), arg::<f64>(a, 2, 1)) };
    loss[0] = 0.0;
    for (i, y) in y.iter_mut().enumerate() {
        *y -= targets[i / WIDTH] as f32 / VOCAB as f32;
        loss[0] += f64::from(*y) * f64::from(*y) / 2.0;
        *y /= X as f32;
    }
}

/// dy, w -> dx
unsafe extern "C-unwind" fn input_gradient(a: *const *mut u8) {
    let (dy, w, dx) = unsafe { (arg::<f32>(a, 0, X), arg::<f32>(a, 1, WIDTH), arg::<f32>(a, 2, X)) };
    for (i, dx) in dx.iter_mut().enumerate() {
        *dx = dy[i] + dy[i] * w[i % WIDTH];
    }
}

/// Column `j` of dy * x, summed from zero.
unsafe fn gradient(a: *const *mut u8, j: usize) -> f32 {
    let (dy, x) = unsafe { (arg::<f32>(a, 0, X), arg::<f32>(a, 1, X)) };
    (0..ROWS).fold(0.0, |g, r| g + dy[r * WIDTH + j] * x[r * WIDTH + j])
}

/// dy, x -> acc
unsafe extern "C-unwind" fn gradient_store(a: *const *mut u8) {
    let acc = unsafe { arg::<f32>(a, 2, WIDTH) };
    for (j, acc) in acc.iter_mut().enumerate() {
        *acc = unsafe { gradient(a, j) };
    }
}

/// dy, x, inout acc
unsafe extern "C-unwind" fn gradient_add(a: *const *mut u8) {
    let acc = unsafe { arg::<f32>(a, 2, WIDTH) };
    for (j, acc) in acc.iter_mut().enumerate() {
        *acc += unsafe { gradient(a, j) };
    }
}

fn sgd(hyper: &[f32], g: f32, w: &mut f32, m: &mut f32) {
    *m = hyper[0] * *m + g;
    *w = hyper[7] * *w - hyper[6] * *m;
}

/// dy, x, acc, hyper, inout w, m
unsafe extern "C-unwind" fn gradient_update(a: *const *mut u8) {
    let (acc, hyper) = unsafe { (arg::<f32>(a, 2, WIDTH), arg::<f32>(a, 3, HYPER_LEN)) };
    let (w, m) = unsafe { (arg::<f32>(a, 4, WIDTH), arg::<f32>(a, 5, WIDTH)) };
    for j in 0..WIDTH {
        let g = acc[j] + unsafe { gradient(a, j) };
        sgd(hyper, g, &mut w[j], &mut m[j]);
    }
}

/// dy, x, hyper, inout w, m
unsafe extern "C-unwind" fn gradient_update_alone(a: *const *mut u8) {
    let hyper = unsafe { arg::<f32>(a, 2, 8) };
    let (w, m) = unsafe { (arg::<f32>(a, 3, WIDTH), arg::<f32>(a, 4, WIDTH)) };
    for j in 0..WIDTH {
        let g = unsafe { gradient(a, j) };
        sgd(hyper, g, &mut w[j], &mut m[j]);
    }
}

pub unsafe extern "C-unwind" fn fails(_: *const *mut u8) {
    panic!("the kernel gave up");
}
