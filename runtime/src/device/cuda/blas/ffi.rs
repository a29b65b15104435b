//! Calls of cuBLASLt. The library is opened by the names that its packages install; nothing here panics without it.
//!
//! # Why they are sound
//!
//! The functions have the types of `cublasLt.h`, which `cudarc` has transcribed; the library stays open as long as what was made with it.
//! Handles and descriptions are made here, used by their owner only, on one thread at a time, and destroyed once. A product's operands are
//! places of an arena that outlives the stream's work, of the sizes that the description says: the bundle's check saw to that.

use crate::device::cuda::driver::Gpu;
use crate::device::library::Library;
use crate::device::library::descriptor::{Compute, Descriptor, Element, Layout};
use artifact::product::Product;
use artifact::tuning::{Algorithm, Identity, Settings};
use cudarc::cublaslt::sys;
use libloading::Library as SharedLibrary;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Places of the arena lie at multiples of this: see [`artifact::structure`].
const OPERAND_ALIGN: u32 = 64;

/// Names to open the library by, that of a version that is wanted first.
fn names(version: Option<u64>) -> Vec<String> {
    let wanted = version.map(|version| format!("libcublasLt.so.{}", version / 10_000));
    let others = NAMES.iter().map(|&name| name.to_owned()).filter(|name| Some(name) != wanted.as_ref());
    wanted.iter().cloned().chain(others).collect()
}

/// `cublasStatus_t`, of which a later library may have more than this one knows.
type Code = c_int;
const SUCCESS: Code = 0;

type Handle = sys::cublasLtHandle_t;
type Description = sys::cublasLtMatmulDesc_t;
type Matrix = sys::cublasLtMatrixLayout_t;
type Preference = sys::cublasLtMatmulPreference_t;
type Raw = sys::cublasLtMatmulAlgo_t;

/// `cublasLtMatmulHeuristicResult_t`, with a status that may be any number.
#[repr(C)]
#[derive(Clone, Copy)]
struct Proposal {
    algorithm: Raw,
    workspace_bytes: usize,
    state: Code,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Proposal>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());

const NO_PROPOSAL: Proposal =
    Proposal { algorithm: Raw { data: [0; 8] }, workspace_bytes: 0, state: SUCCESS, waves: 0.0, reserved: [0; 4] };

type Attribute<T, A> = unsafe extern "C" fn(T, A, *const c_void, usize) -> Code;
type Create<T> = unsafe extern "C" fn(*mut T) -> Code;
type Destroy<T> = unsafe extern "C" fn(T) -> Code;
type Operands = (Handle, Description, [Matrix; 3]);

/// The library's functions.
pub struct Lt {
    version: unsafe extern "C" fn() -> usize,
    status: unsafe extern "C" fn(Code) -> *const c_char,
    create: Create<Handle>,
    destroy: Destroy<Handle>,
    describe: unsafe extern "C" fn(*mut Description, sys::cublasComputeType_t, sys::cudaDataType) -> Code,
    set: Attribute<Description, sys::cublasLtMatmulDescAttributes_t>,
    forget: Destroy<Description>,
    lay_out: unsafe extern "C" fn(*mut Matrix, sys::cudaDataType, u64, u64, i64) -> Code,
    forget_layout: Destroy<Matrix>,
    prefer: Create<Preference>,
    set_preference: Attribute<Preference, sys::cublasLtMatmulPreferenceAttributes_t>,
    forget_preference: Destroy<Preference>,
    propose: unsafe extern "C" fn(
        Handle,
        Description,
        Matrix,
        Matrix,
        Matrix,
        Matrix,
        Preference,
        c_int,
        *mut Proposal,
        *mut c_int,
    ) -> Code,
    check: unsafe extern "C" fn(Handle, Description, Matrix, Matrix, Matrix, Matrix, *const Raw, *mut Proposal) -> Code,
    setting: unsafe extern "C" fn(
        *const Raw,
        sys::cublasLtMatmulAlgoConfigAttributes_t,
        *mut c_void,
        usize,
        *mut usize,
    ) -> Code,
    product: unsafe extern "C" fn(
        Handle,
        Description,
        *const c_void,
        *const c_void,
        Matrix,
        *const c_void,
        Matrix,
        *const c_void,
        *const c_void,
        Matrix,
        *mut c_void,
        Matrix,
        *const Raw,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Code,
    _library: SharedLibrary,
}

impl Lt {
    /// Opens the library, of a version that is wanted if it is there.
    ///
    /// # Errors
    /// Where it was looked for.
    pub fn load(version: Option<u64>) -> Result<Lt, String> {
        let names = names(version);
        // SAFETY: cuBLASLt's initialisers do nothing that a process must be ready for.
        let library = names.iter().find_map(|name| unsafe { SharedLibrary::new(name) }.ok());
        let library = library.ok_or_else(|| {
            format!("cuBLASLt was not found (looked for {}, also in LD_LIBRARY_PATH)", names.join(", "))
        })?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of `cublasLt.h`.
                *unsafe { library.get($name) }
                    .map_err(|_| format!("the cuBLASLt that was found has no {}", String::from_utf8_lossy($name)))?
            };
        }
        Ok(Lt {
            version: function!(b"cublasLtGetVersion"),
            status: function!(b"cublasLtGetStatusString"),
            create: function!(b"cublasLtCreate"),
            destroy: function!(b"cublasLtDestroy"),
            describe: function!(b"cublasLtMatmulDescCreate"),
            set: function!(b"cublasLtMatmulDescSetAttribute"),
            forget: function!(b"cublasLtMatmulDescDestroy"),
            lay_out: function!(b"cublasLtMatrixLayoutCreate"),
            forget_layout: function!(b"cublasLtMatrixLayoutDestroy"),
            prefer: function!(b"cublasLtMatmulPreferenceCreate"),
            set_preference: function!(b"cublasLtMatmulPreferenceSetAttribute"),
            forget_preference: function!(b"cublasLtMatmulPreferenceDestroy"),
            propose: function!(b"cublasLtMatmulAlgoGetHeuristic"),
            check: function!(b"cublasLtMatmulAlgoCheck"),
            setting: function!(b"cublasLtMatmulAlgoConfigGetAttribute"),
            product: function!(b"cublasLtMatmul"),
            _library: library,
        })
    }

    /// As cuBLASLt numbers its versions, e.g. 130002.
    pub fn version(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.version)() as u64 }
    }

    fn result(&self, what: &str, code: Code) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: gives a string that lives as long as the library, or nothing.
        let text = unsafe {
            let start = (self.status)(code);
            (!start.is_null()).then(|| CStr::from_ptr(start).to_string_lossy().into_owned())
        };
        Err(format!("cuBLASLt: {what}: {}", text.unwrap_or_else(|| format!("error {code}"))))
    }

    fn attribute<T, A, V>(&self, set: Attribute<T, A>, of: T, attribute: A, value: &V) -> Result<(), String> {
        // SAFETY: the value has the type that the attribute takes, as each caller sees to.
        let done = unsafe { set(of, attribute, from_ref(value).cast(), size_of::<V>()) };
        self.result("setting an attribute", done)
    }

    fn matrix(&self, layout: &Layout) -> Result<Matrix, String> {
        let mut made = null_mut();
        let leading = i64::try_from(layout.leading).map_err(|_| "a matrix is too large".to_owned())?;
        // SAFETY: writes one handle.
        let done = unsafe { (self.lay_out)(&raw mut made, kind(layout.element), layout.rows, layout.columns, leading) };
        self.result("describing a matrix", done).map(|()| made)
    }
}

fn kind(element: Element) -> sys::cudaDataType {
    match element {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// A product as cuBLASLt is asked for it.
struct Described {
    lt: Arc<Lt>,
    terms: Descriptor,
    description: Description,
    /// Of A, B and C.
    matrices: [Matrix; 3],
}

impl Described {
    fn new(lt: Arc<Lt>, product: &Product) -> Result<Described, String> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        let terms = Descriptor::new(product);
        let compute = match terms.compute {
            Compute::F32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Compute::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        };
        let mut made = Described { lt: lt.clone(), terms, description: null_mut(), matrices: [null_mut(); 3] };
        // SAFETY: writes one handle.
        let done = unsafe { (lt.describe)(&raw mut made.description, compute, sys::cudaDataType::CUDA_R_32F) };
        lt.result("describing a product", done)?;
        for (attribute, turned) in
            [A::CUBLASLT_MATMUL_DESC_TRANSA, A::CUBLASLT_MATMUL_DESC_TRANSB].into_iter().zip(terms.turned)
        {
            // `CUBLAS_OP_T` is 1.
            lt.attribute(lt.set, made.description, attribute, &i32::from(turned))?;
        }
        if terms.roles.bias.is_some() {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            lt.attribute(lt.set, made.description, A::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            // Proposals read the alignment off the address.
            made.set_bias(OPERAND_ALIGN.into())?;
        }
        for (matrix, layout) in made.matrices.iter_mut().zip([terms.a, terms.b, terms.c]) {
            *matrix = lt.matrix(&layout)?;
        }
        Ok(made)
    }

    fn set_bias(&self, address: u64) -> Result<(), String> {
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        self.lt.attribute(self.lt.set, self.description, attribute, &address)
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        unsafe {
            for matrix in self.matrices.into_iter().filter(|m| !m.is_null()) {
                (self.lt.forget_layout)(matrix);
            }
            if !self.description.is_null() {
                (self.lt.forget)(self.description);
            }
        }
    }
}

/// cuBLASLt on a GPU.
pub struct Blas {
    lt: Arc<Lt>,
    handle: Handle,
    identity: Identity,
    described: HashMap<Product, Described>,
    /// Holds the context that the handle is of.
    gpu: Gpu,
}

// SAFETY: its owner has all calls on one thread at a time.
unsafe impl Send for Blas {}

impl Blas {
    /// # Errors
    /// In cuBLASLt's words; so for all of the below. The GPU's context must be the thread's in each.
    pub fn new(lt: Arc<Lt>, gpu: Gpu, identity: Identity) -> Result<Blas, String> {
        gpu.enter()?;
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        let made = unsafe { (lt.create)(&raw mut handle) };
        lt.result("starting", made)?;
        Ok(Blas { lt, handle, identity, described: HashMap::new(), gpu })
    }

    /// The product as it is asked for, and the handles of the calls.
    fn described(&mut self, product: &Product) -> Result<(&Described, Operands), String> {
        let described = match self.described.entry(*product) {
            Entry::Occupied(known) => &*known.into_mut(),
            Entry::Vacant(new) => &*new.insert(Described::new(self.lt.clone(), product)?),
        };
        Ok((described, (self.handle, described.description, described.matrices)))
    }

    /// Whether the library takes an algorithm for a product, with the workspace that it has.
    pub fn check(&mut self, product: &Product, algorithm: &Algorithm) -> Result<(), String> {
        let lt = self.lt.clone();
        let (_, (handle, description, [a, b, c])) = self.described(product)?;
        let (raw, mut found) = (Raw { data: algorithm.words }, NO_PROPOSAL);
        // SAFETY: all handles live, and the algorithm is only read.
        let done = unsafe { (lt.check)(handle, description, a, b, c, c, &raw const raw, &raw mut found) };
        lt.result("checking an algorithm of the bundle", done)?;
        if found.workspace_bytes as u64 > algorithm.workspace_bytes {
            let (wanted, has) = (found.workspace_bytes, algorithm.workspace_bytes);
            return Err(format!(
                "cuBLASLt: an algorithm of the bundle wants {wanted} bytes of workspace and has {has}"
            ));
        }
        Ok(())
    }

    /// Enqueues a product over operands at these addresses, in the kernel's order.
    pub fn run(
        &mut self,
        product: &Product,
        algorithm: &Algorithm,
        addresses: &[u64],
        workspace: u64,
        stream: *mut c_void,
    ) -> Result<(), String> {
        let lt = self.lt.clone();
        let (described, (handle, description, matrices)) = self.described(product)?;
        let (terms, [a, b, c]) = (described.terms, matrices);
        if let Some(bias) = terms.roles.bias {
            described.set_bias(addresses[bias])?;
        }
        let at = |operand: usize| addresses[operand] as *mut c_void;
        let (alpha, beta, raw) = (1.0f32, terms.beta, Raw { data: algorithm.words });
        let bytes = algorithm.workspace_bytes as usize;
        let workspace = if bytes == 0 { null_mut() } else { workspace as *mut c_void };
        // SAFETY: see the module's text; the factors and the algorithm are read during the call.
        let done = unsafe {
            (lt.product)(
                handle,
                description,
                from_ref(&alpha).cast(),
                at(terms.roles.a),
                a,
                at(terms.roles.b),
                b,
                from_ref(&beta).cast(),
                at(terms.roles.c),
                c,
                at(terms.roles.c),
                c,
                &raw const raw,
                workspace,
                bytes,
                stream,
            )
        };
        lt.result("enqueuing a product", done)
    }

    fn settings(&self, raw: &Raw) -> Settings {
        use sys::cublasLtMatmulAlgoConfigAttributes_t as A;
        // Those of two bytes leave the upper half; an older library's missing ones stay 0.
        let get = |attribute: A, bytes: usize| {
            let (mut value, mut written) = (0u32, 0usize);
            let to = (&raw mut value).cast::<c_void>();
            // SAFETY: writes at most so many bytes, of the four that there are.
            unsafe { (self.lt.setting)(raw, attribute, to, bytes, &raw mut written) };
            value
        };
        Settings {
            id: get(A::CUBLASLT_ALGO_CONFIG_ID, 4),
            tile: get(A::CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
            stages: get(A::CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
            split_k: get(A::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4),
            reduction: get(A::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4),
            swizzle: get(A::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
            custom: get(A::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4),
            inner_shape: get(A::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
            cluster_shape: get(A::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
        }
    }
}

/// Preferences of a search, destroyed at its end.
struct Preferences(Arc<Lt>, Preference);

impl Preferences {
    fn new(lt: &Arc<Lt>, workspace_bytes: u64) -> Result<Preferences, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as A;
        let mut made = null_mut();
        // SAFETY: writes one handle.
        let done = unsafe { (lt.prefer)(&raw mut made) };
        lt.result("making preferences", done)?;
        let preferences = Preferences(lt.clone(), made);
        lt.attribute(lt.set_preference, made, A::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes)?;
        for align in [
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            lt.attribute(lt.set_preference, made, align, &OPERAND_ALIGN)?;
        }
        Ok(preferences)
    }
}

impl Drop for Preferences {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        unsafe { (self.0.forget_preference)(self.1) };
    }
}

impl Library for Blas {
    fn identity(&self) -> Result<Identity, String> {
        Ok(self.identity.clone())
    }

    fn candidates(&mut self, product: &Product, workspace_bytes: u64, most: usize) -> Result<Vec<Algorithm>, String> {
        let lt = self.lt.clone();
        self.gpu.enter()?;
        let preferences = Preferences::new(&lt, workspace_bytes)?;
        let (_, (handle, description, [a, b, c])) = self.described(product)?;
        let (mut found, mut count) = (vec![NO_PROPOSAL; most], 0);
        // SAFETY: all handles live; writes at most `most` proposals and their number.
        let done = unsafe {
            let (to, counted) = (found.as_mut_ptr(), &raw mut count);
            (lt.propose)(handle, description, a, b, c, c, preferences.1, most as c_int, to, counted)
        };
        // `CUBLAS_STATUS_NOT_SUPPORTED`: it knows none.
        if done == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as Code {
            return Ok(Vec::new());
        }
        lt.result("searching algorithms", done)?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        let kept = found.iter().filter(|proposal| proposal.state == SUCCESS);
        let algorithm = |proposal: &Proposal| Algorithm {
            words: proposal.algorithm.data,
            workspace_bytes: proposal.workspace_bytes as u64,
            settings: self.settings(&proposal.algorithm),
        };
        Ok(kept.map(algorithm).collect())
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.described.clear();
        if self.gpu.enter().is_ok() {
            // SAFETY: made in `new` in this context, destroyed once, after the stream's work: its owner waits for that.
            unsafe { (self.lt.destroy)(self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::product::{Elements, Form};

    type Get<T, A> = unsafe extern "C" fn(T, A, *mut c_void, usize, *mut usize) -> Code;

    /// What the library says that an attribute is.
    fn read<T, A, V: Default>(get: Get<T, A>, of: T, attribute: A) -> V {
        let (mut value, mut written) = (V::default(), 0);
        // SAFETY: the value has the attribute's type.
        let done = unsafe { get(of, attribute, (&raw mut value).cast(), size_of::<V>(), &raw mut written) };
        assert_eq!((done, written), (SUCCESS, size_of::<V>()));
        value
    }

    #[test]
    fn a_tuned_bundle_opens_its_own_version_first() {
        assert_eq!(names(None), NAMES);
        assert_eq!(names(Some(130_002)), NAMES);
        assert_eq!(names(Some(120_804)), ["libcublasLt.so.12", "libcublasLt.so.13", "libcublasLt.so"]);
        assert_eq!(names(Some(140_000))[..2], ["libcublasLt.so.14", "libcublasLt.so.13"]);
    }

    /// Where there is a cuBLASLt: it takes our descriptions without a GPU, and reads out of them what went in.
    #[test]
    fn descriptions_are_those_that_the_library_knows() {
        use sys::cublasLtMatmulDescAttributes_t as A;
        use sys::cublasLtMatrixLayoutAttribute_t as L;
        let Ok(lt) = Lt::load(None).map(Arc::new) else {
            eprintln!("skipped: there is no cuBLASLt here");
            return;
        };
        assert!(lt.version() >= 110_000, "{}", lt.version());
        // SAFETY: the types are those of `cublasLt.h`.
        let (get, get_layout) = unsafe {
            let get: Get<Description, A> = *lt._library.get(b"cublasLtMatmulDescGetAttribute").unwrap();
            let get_layout: Get<Matrix, L> = *lt._library.get(b"cublasLtMatrixLayoutGetAttribute").unwrap();
            (get, get_layout)
        };
        for (form, elements, rounded, bias) in [
            (Form::Nn, Elements::F32, false, true),
            (Form::Nt, Elements::Tf32, false, false),
            (Form::Tn, Elements::Bf16, true, false),
        ] {
            let product = Product { form, m: 3, n: 5, k: 7, elements, rounded, adds: false, bias };
            let made = Described::new(lt.clone(), &product).unwrap();
            let compute = if elements == Elements::Tf32 { 77 } else { 68 };
            assert_eq!(read::<_, _, i32>(get, made.description, A::CUBLASLT_MATMUL_DESC_COMPUTE_TYPE), compute);
            assert_eq!(read::<_, _, i32>(get, made.description, A::CUBLASLT_MATMUL_DESC_SCALE_TYPE), 0);
            let turned = [A::CUBLASLT_MATMUL_DESC_TRANSA, A::CUBLASLT_MATMUL_DESC_TRANSB];
            let turned = turned.map(|attribute| read::<_, _, i32>(get, made.description, attribute));
            assert_eq!(turned, [i32::from(form == Form::Nt), i32::from(form == Form::Tn)]);
            let epilogue = read::<_, _, u32>(get, made.description, A::CUBLASLT_MATMUL_DESC_EPILOGUE);
            assert_eq!(epilogue, if bias { 4 } else { 1 });
            made.set_bias(0x1240).unwrap();
            assert_eq!(read::<_, _, u64>(get, made.description, A::CUBLASLT_MATMUL_DESC_BIAS_POINTER), 0x1240);
            for (matrix, layout) in made.matrices.into_iter().zip([made.terms.a, made.terms.b, made.terms.c]) {
                let kind = if layout.element == Element::Bf16 { 14 } else { 0 };
                assert_eq!(read::<_, _, u32>(get_layout, matrix, L::CUBLASLT_MATRIX_LAYOUT_TYPE), kind);
                assert_eq!(read::<_, _, u64>(get_layout, matrix, L::CUBLASLT_MATRIX_LAYOUT_ROWS), layout.rows);
                assert_eq!(read::<_, _, u64>(get_layout, matrix, L::CUBLASLT_MATRIX_LAYOUT_COLS), layout.columns);
                assert_eq!(read::<_, _, i64>(get_layout, matrix, L::CUBLASLT_MATRIX_LAYOUT_LD), layout.leading as i64);
                // `CUBLASLT_ORDER_COL`.
                assert_eq!(read::<_, _, i32>(get_layout, matrix, L::CUBLASLT_MATRIX_LAYOUT_ORDER), 0);
            }
            Preferences::new(&lt, 1 << 20).unwrap();
        }
        // Without a GPU there is no more than a sentence.
        let words = lt.result("starting", 1).unwrap_err();
        assert!(words.starts_with("cuBLASLt: starting: ") && words.len() > 22, "{words}");
    }
}
