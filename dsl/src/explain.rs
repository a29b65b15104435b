//! The page of each diagnostic.

/// Codes and their pages in `docs/diagnostics`. A page of any crate is added by writing the file and its code here.
macro_rules! pages {
    ($($code:ident)*) => {
        &[$((stringify!($code), include_str!(concat!("../../docs/diagnostics/", stringify!($code), ".md")))),*]
    };
}

#[rustfmt::skip]
const PAGES: &[(&str, &str)] = pages![
    // Syntax.
    P0101 P0102 P0103 P0104 P0105 P0106 P0107
    // Names, values, types.
    P0201 P0202 P0203 P0204 P0205 P0206 P0207 P0208 P0209 P0210 P0211 P0212 P0213 P0214 P0215 P0216 P0217 P0218 P0219
    // Partition and rates.
    P0220 P0221 P0222 P0223 P0224 P0226 P0229
    // Corrections.
    P0225
    // Schedule blocks.
    P0231 P0232 P0233 P0234 P0235 P0236
    // Element types.
    P0237
    // Without effect.
    P0240 P0241
    // What a target lacks.
    P0242 P0243
    // The command line.
    P0250 P0251
    // Plan: one code a line.
    P0301
    P0302
    P0303
    P0304
    P0305
    P0306
    P0307
    P0308
    P0309
    P0310
    P0311
    P0312
    P0313
    P0314
    P0320
    P0330
    P0331
    P0332
    P0340
    P0343
    P0344
    P0345
    P0399
    // Model and memory: one code a line.
    P0401
    P0410
    P0411
    P0412
    P0420
    P0421
    P0422
    P0430
    P0431
    // Searches.
    P0501
    // Tables of actions: one code a line.
    P0601
    P0602
    P0603
    P0604
    P0605
    P0606
    P0607
    P0608
    P0609
    P0610
    P0611
    P0620
    P0621
    P0622
    P0623
];

/// The page of a code such as `P0101`: what it means, an example, how to fix it.
pub fn explain(code: &str) -> Option<&'static str> {
    PAGES.iter().find(|(known, _)| *known == code).map(|(_, page)| *page)
}

/// Every code that has a page.
pub fn codes() -> impl Iterator<Item = &'static str> {
    PAGES.iter().map(|(code, _)| *code)
}
