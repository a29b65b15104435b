//! Groups of items to lines.

use super::tree::{Above, Group, Item, Node};
use crate::lex::Kind;

/// Longest line that a one-line block may have.
pub const WIDTH_MAX: usize = 120;
/// First column, from 0, of comments after code.
pub const COMMENT_COLUMN: usize = 35;

const INDENT: usize = 2;

#[derive(Clone, Debug, Default)]
struct Line {
    code: String,
    comment: Option<String>,
}

impl Line {
    fn is_blank(&self) -> bool {
        self.code.is_empty() && self.comment.is_none()
    }
}

/// The file's text.
pub fn layout(file: &Group) -> String {
    let mut page = Page::default();
    let mut apart = false;
    for item in &file.items {
        let start = page.lines.len();
        page.item(item, file, 0, "");
        let own = start + item.above.len() + item.above.iter().filter(|a| a.blank).count() + usize::from(item.blank);
        let long = page.lines.len() > own + 1;
        if start > 0 && (apart || long) && !page.lines[start].is_blank() {
            page.lines.insert(start, Line::default());
        }
        apart = long;
    }
    page.above(&file.dangling, 0);
    page.text()
}

#[derive(Default)]
struct Page {
    lines: Vec<Line>,
}

impl Page {
    fn push(&mut self, indent: usize, code: &str) {
        let code = if code.is_empty() { String::new() } else { format!("{:indent$}{code}", "") };
        self.lines.push(Line { code, comment: None });
    }

    /// Gives the last line a comment.
    fn comment(&mut self, comment: &Option<String>) {
        if let (Some(line), Some(_)) = (self.lines.last_mut(), comment) {
            line.comment.clone_from(comment);
        }
    }

    fn above(&mut self, comments: &[Above], indent: usize) {
        for comment in comments {
            if comment.blank && !self.lines.is_empty() {
                self.push(0, "");
            }
            self.push(indent, &comment.text);
        }
    }

    /// An item on its own line or lines, followed by `separator`.
    fn item(&mut self, item: &Item, of: &Group, indent: usize, separator: &str) {
        self.above(&item.above, indent);
        if item.blank && !self.lines.is_empty() {
            self.push(0, "");
        }
        let flat = flat(item, padding(item, of));
        if !item.is_broken() && indent + flat.len() + separator.len() <= WIDTH_MAX {
            self.push(indent, &(flat + separator));
        } else {
            self.broken(item, of, indent, separator);
        }
        self.comment(&item.trailing);
    }

    /// An item of which at least one group goes over several lines: those that were written so, else the widest.
    fn broken(&mut self, item: &Item, of: &Group, indent: usize, separator: &str) {
        let breakable = |node: &Node| match node {
            Node::Group(group) if item.is_broken() => usize::from(group.is_broken()),
            Node::Group(group) if !group.items.is_empty() => inline(group).len(),
            _ => 0,
        };
        let widest = item.nodes.iter().map(breakable).max().unwrap_or(0);
        let mut code = String::new();
        let mut done = false;
        for (at, node) in item.nodes.iter().enumerate() {
            code.push_str(&" ".repeat(gap(item, at, padding(item, of))));
            match node {
                Node::Group(group) if widest > 0 && breakable(node) == widest && (item.is_broken() || !done) => {
                    done = true;
                    self.push(indent, &(std::mem::take(&mut code) + &group.open));
                    self.comment(&group.opening);
                    self.inside(&Group { broken: true, ..group.clone() }, indent + INDENT);
                    code.push_str(&group.close);
                }
                _ => code.push_str(&written(node)),
            }
        }
        self.push(indent, &(code + separator));
    }

    /// The items of a group over several lines.
    fn inside(&mut self, group: &Group, indent: usize) {
        for (at, item) in group.items.iter().enumerate() {
            let separator = if group.is_block() || at + 1 == group.items.len() { "" } else { "," };
            self.item(item, group, indent, separator);
        }
        self.above(&group.dangling, indent);
    }

    /// Comments in columns; no blank lines at the ends.
    fn text(mut self) -> String {
        let mut at = 0;
        while at < self.lines.len() {
            let run = self.lines[at..].iter().take_while(|line| line.comment.is_some()).count();
            let longest = self.lines[at..at + run].iter().map(|line| line.code.chars().count()).max().unwrap_or(0);
            let column = COMMENT_COLUMN.max(longest + 2);
            for line in &mut self.lines[at..at + run] {
                let comment = line.comment.take().unwrap_or_default();
                let pad = column - line.code.chars().count();
                line.code.push_str(&format!("{:pad$}{comment}", ""));
            }
            at += run.max(1);
        }
        let text = self.lines.iter().fold(String::new(), |text, line| text + line.code.trim_end() + "\n");
        match text.trim_matches('\n') {
            "" => String::new(),
            text => format!("{text}\n"),
        }
    }
}

/// The item on one line, with extra spaces after its first word.
fn flat(item: &Item, padding: usize) -> String {
    item.nodes.iter().enumerate().fold(String::new(), |mut text, (at, node)| {
        text.push_str(&" ".repeat(gap(item, at, padding)));
        text + &written(node)
    })
}

fn written(node: &Node) -> String {
    match node {
        Node::Leaf { text, .. } => text.clone(),
        Node::Group(group) => inline(group),
    }
}

/// The group on one line.
fn inline(group: &Group) -> String {
    let mut text = String::new();
    for (at, item) in group.items.iter().enumerate() {
        text.push_str(&flat(item, 0));
        if at + 1 < group.items.len() {
            text.push_str(separator(group, item));
        }
    }
    match (group.open.as_str(), text.is_empty()) {
        ("{", true) => "{}".into(),
        ("{", false) => format!("{{ {text} }}"),
        _ => format!("{}{text}{}", group.open, group.close),
    }
}

/// Between two items on one line: steps, phases, and everything else.
fn separator(group: &Group, item: &Item) -> &'static str {
    const PHASES: [&str; 3] = ["warmup", "repeat", "drain"];
    match group.head.as_str() {
        _ if !group.is_block() => ", ",
        "order" if !item.separated => " ",
        head if PHASES.contains(&head) => "; ",
        _ if !item.separated => " ",
        _ => ", ",
    }
}

/// Spaces before the node `at`.
fn gap(item: &Item, at: usize, padding: usize) -> usize {
    let Some(before) = at.checked_sub(1).map(|before| &item.nodes[before]) else { return 0 };
    usize::from(apart(item, at, before)) + if at == 1 { padding } else { 0 }
}

/// Whether a space stands before the node `at`.
fn apart(item: &Item, at: usize, before: &Node) -> bool {
    /// Words that an expression follows: what comes next is no argument list, a minus no difference.
    const OPENERS: [&str; 4] = ["warmup", "repeat", "when", "every"];
    let opener = |node: &Node| matches!(node, Node::Leaf { text, .. } if OPENERS.contains(&text.as_str()));
    match (before, &item.nodes[at]) {
        (Node::Leaf { kind: Kind::Dots, .. }, _) | (_, Node::Leaf { kind: Kind::Dots, .. }) => false,
        // A sign belongs to its number.
        (Node::Leaf { kind: Kind::Operator, text, .. }, _) if text == "-" => match at.checked_sub(2) {
            None => false,
            Some(operand) => match &item.nodes[operand] {
                node @ Node::Leaf { kind: Kind::Word, .. } => !opener(node),
                Node::Leaf { kind, .. } => *kind == Kind::Number,
                Node::Group(_) => true,
            },
        },
        (Node::Leaf { kind: Kind::Word, .. }, Node::Group(group)) if group.open == "(" => opener(before),
        // `0F1` and `2x`, but `128 MiB`.
        (Node::Leaf { kind: Kind::Number, .. }, Node::Leaf { kind: Kind::Word, text, glued }) => {
            !(text == "x" || *glued && text.bytes().any(|b| !b.is_ascii_alphabetic()))
        }
        _ => true,
    }
}

/// Spaces after an item's first word that bring it in line with the group's other items.
fn padding(item: &Item, of: &Group) -> usize {
    if !of.broken || of.open != "{" {
        return 0;
    }
    let width = if matches!(of.head.as_str(), "schedule" | "order") { first_word } else { up_to_sign };
    let Some(own) = width(item) else { return 0 };
    of.items.iter().filter_map(width).max().unwrap_or(own) - own
}

/// Length of the first word of an item on one line.
fn first_word(item: &Item) -> Option<usize> {
    match &item.nodes[..] {
        [Node::Leaf { text, .. }, _, ..] if !item.is_broken() => Some(text.len()),
        _ => None,
    }
}

/// Length of `key =`.
fn up_to_sign(item: &Item) -> Option<usize> {
    match &item.nodes[..] {
        [Node::Leaf { text: key, .. }, Node::Leaf { kind: Kind::Assign | Kind::Compare, text, .. }, ..] => {
            Some(key.len() + 1 + text.len())
        }
        _ => None,
    }
}
