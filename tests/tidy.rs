//! Habits of the project's text that no compiler checks. Every test lists all places that break its rule.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a Rust file. A longer one has two jobs.
const FILE_LINES_MAX: usize = 600;
/// Lines of a function, its signature and last brace included.
const FUNCTION_LINES_MAX: usize = 80;
/// Names of the files that may hold unsafe code: calls through a C interface, mapped memory, the arena. Tests may
/// call and write kernels anywhere.
const UNSAFE_FILES: [&str; 3] = ["ffi.rs", "map.rs", "arena.rs"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The project's own files whose extension is one of `extensions`, with paths relative to the root: (path, text).
fn files(extensions: &[&str]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the project") {
            let path = entry.expect("an entry of the project").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                // Build output of any target folder carries this mark; other dotted folders are git's and cargo's.
                let built = path.join("CACHEDIR.TAG").exists() || name == "target";
                if !built && (!name.starts_with('.') || name == ".ci") {
                    folders.push(path);
                }
            } else if extensions.iter().any(|e| path.extension().is_some_and(|x| x == *e)) {
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                found.insert(relative(&path), text);
            }
        }
    }
    assert!(!found.is_empty(), "no file with one of {extensions:?}: is this the project's root?");
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

/// Fails with the rule and all places when there are any.
fn none(places: Vec<String>, rule: &str) {
    assert!(places.is_empty(), "{rule}\n  {}", places.join("\n  "));
}

#[test]
fn rust_files_have_one_job() {
    let long = files(&["rs"])
        .iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|&(_, lines)| lines > FILE_LINES_MAX)
        .map(|(path, lines)| format!("{path}: {lines} lines"))
        .collect();
    none(long, &format!("Rust files of more than {FILE_LINES_MAX} lines; split them by what they do:"));
}

#[test]
fn functions_fit_a_screen() {
    let rust = files(&["rs"]);
    let long = rust.iter().flat_map(|(path, text)| {
        functions(text)
            .into_iter()
            .filter(|f| f.lines > FUNCTION_LINES_MAX)
            .map(move |f| format!("{path}:{}: {} lines", f.line, f.lines))
    });
    none(long.collect(), &format!("functions of more than {FUNCTION_LINES_MAX} lines; name their parts:"));
}

/// Words that may stand before `fn`, beside `pub`.
const QUALIFIERS: [&str; 5] = ["const", "async", "extern", "\"C\"", concat!("un", "safe")];

struct Function {
    /// 1-based line of its `fn`.
    line: usize,
    lines: usize,
}

/// Functions of a formatted file: from a line with `fn` to the first line that closes a brace at the same depth.
fn functions(text: &str) -> Vec<Function> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let Some((before, _)) = code.split_once("fn ") else { continue };
        let qualified = before.split_whitespace().all(|word| word.starts_with("pub") || QUALIFIERS.contains(&word));
        if !qualified || code.ends_with(';') || code.ends_with('}') {
            continue;
        }
        let close = format!("{}}}", &line[..line.len() - code.len()]);
        if let Some(length) = lines[start..].iter().position(|l| *l == close) {
            found.push(Function { line: start + 1, lines: length + 1 });
        }
    }
    found
}

#[test]
fn functions_are_measured() {
    let text =
        "fn a() {\n    x\n}\nimpl B {\n    pub fn c(\n        d: E,\n    ) {\n        y\n    }\n    fn f();\n}\n";
    let measured: Vec<_> = functions(text).iter().map(|f| (f.line, f.lines)).collect();
    assert_eq!(measured, [(1, 3), (5, 5)]);
}

#[test]
fn unsafe_code_is_in_files_named_for_it() {
    let keyword = concat!("un", "safe");
    let opens =
        [format!("{keyword} {{"), format!("{keyword} fn"), format!("{keyword} impl"), format!("{keyword} extern")];
    let mut places = Vec::new();
    for (path, text) in files(&["rs"]) {
        let test = path.split('/').any(|folder| folder == "tests");
        if test || UNSAFE_FILES.iter().any(|name| path.ends_with(&format!("/{name}"))) {
            continue;
        }
        let lines = text.lines().enumerate().filter(|(_, line)| opens.iter().any(|o| line.contains(o)));
        places.extend(lines.map(|(n, line)| format!("{path}:{}: {}", n + 1, line.trim())));
    }
    none(places, &format!("unsafe code outside {UNSAFE_FILES:?}:"));
}

#[test]
fn nothing_is_left_to_do() {
    let marks = [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("dbg", "!("), concat!("FIX", "ME")];
    let mut places = Vec::new();
    for (path, text) in files(&["rs", "py", "sh", "pace"]) {
        let lines = text.lines().enumerate().filter(|(_, line)| marks.iter().any(|m| line.contains(m)));
        places.extend(lines.map(|(n, line)| format!("{path}:{}: {}", n + 1, line.trim())));
    }
    none(places, "unfinished code:");
}

#[test]
fn no_path_or_host_of_one_machine() {
    // In pieces, so that this file passes.
    let machine = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/tmp/", "target"),
        concat!("deb.deb", "ian.org"),
        concat!("snapshot.deb", "ian.org"),
        concat!("index.cra", "tes.io"),
        concat!("files.pythonh", "osted.org"),
        concat!("pkg", ".dev"),
    ];
    let mut places = Vec::new();
    for (path, text) in files(&["rs", "md", "py", "sh", "pace", "toml", "json", "snap", "txt", "yml"]) {
        let lines = text.lines().enumerate().filter(|(_, line)| machine.iter().any(|m| line.contains(m)));
        places.extend(lines.map(|(n, line)| format!("{path}:{}: {}", n + 1, line.trim())));
    }
    none(places, "paths or hosts that exist on one machine only:");
}

#[test]
fn links_between_documents_resolve() {
    let documents = files(&["md"]);
    let mut broken = Vec::new();
    for (path, text) in &documents {
        for link in links(text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let folder = root().join(path).parent().expect("a file has a folder").to_path_buf();
            let target = if file.is_empty() { root().join(path) } else { folder.join(file) };
            if !target.exists() {
                broken.push(format!("{path}: {link}: no such file"));
            } else if !heading.is_empty() && !headings(&target).iter().any(|h| h == heading) {
                broken.push(format!("{path}: {link}: no such heading"));
            }
        }
    }
    none(broken, "links that lead nowhere:");
}

/// Targets of `[text](target)` outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        // Odd pieces are inline code.
        for prose in line.split('`').step_by(2) {
            let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            found.extend(targets.map(|(target, _)| target.split(' ').next().unwrap_or_default().to_owned()));
        }
    }
    found
}

/// Anchors of a document's headings, as code hosts derive them.
fn headings(document: &PathBuf) -> Vec<String> {
    let text = fs::read_to_string(document).unwrap_or_default();
    let titles = text.lines().filter_map(|line| line.strip_prefix('#').map(|l| l.trim_start_matches('#').trim()));
    let slug = |title: &str| -> String {
        let kept = title.to_lowercase().replace(' ', "-");
        kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
    };
    titles.map(slug).collect()
}

#[test]
fn links_are_found() {
    let text = "See [a](b.md) and `[x](no.md)`.\n```\n[y](no.md)\n```\n[c](d.md#e-f \"title\")\n";
    assert_eq!(links(text), ["b.md", "d.md#e-f"]);
}

#[test]
fn examples_that_are_named_exist() {
    let mut missing = Vec::new();
    for (path, text) in files(&["rs", "md", "py", "sh", "pace"]) {
        for (n, line) in text.lines().enumerate() {
            for rest in line.split("examples/").skip(1) {
                let name: String =
                    rest.chars().take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')).collect();
                if name.ends_with(".pace") && !root().join("examples").join(&name).exists() {
                    missing.push(format!("{path}:{}: examples/{name}", n + 1));
                }
            }
        }
    }
    none(missing, "examples that do not exist:");
}

#[test]
fn scripts_say_what_they_are() {
    let silent = files(&["sh"])
        .into_iter()
        .filter(|(_, text)| {
            let mut lines = text.lines();
            lines.next() != Some("#!/usr/bin/env bash") || !lines.next().is_some_and(|l| l.starts_with("# "))
        })
        .map(|(path, _)| path);
    none(silent.collect(), "scripts without the bash line and a comment that says what they are for:");
}
