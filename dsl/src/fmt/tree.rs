//! Tokens to groups of items, with the comments beside them. The text is known to parse.

use crate::lex::{Kind, Token};

/// What stands between two brackets, or the whole file.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// The opening bracket; empty for the file.
    pub open: String,
    pub close: String,
    /// First word of the item that the group belongs to: `schedule`, `order`, `machine`.
    pub head: String,
    pub items: Vec<Item>,
    /// Comment on the line of the opening bracket.
    pub opening: Option<String>,
    /// Comments before the closing bracket.
    pub dangling: Vec<Above>,
    /// Written over several lines.
    pub broken: bool,
}

/// An entry of a block, an element of a list.
#[derive(Clone, Debug, Default)]
pub struct Item {
    pub nodes: Vec<Node>,
    pub above: Vec<Above>,
    /// A blank line before the item itself.
    pub blank: bool,
    /// Comment at the end of its line.
    pub trailing: Option<String>,
    /// A separator follows it.
    pub separated: bool,
}

/// A comment on a line of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Above {
    pub text: String,
    /// A blank line before it.
    pub blank: bool,
}

#[derive(Clone, Debug)]
pub enum Node {
    Leaf {
        kind: Kind,
        text: String,
        /// No white space before it.
        glued: bool,
    },
    Group(Group),
}

impl Item {
    /// Whether some group in it is written over several lines.
    pub fn is_broken(&self) -> bool {
        self.nodes.iter().any(|node| matches!(node, Node::Group(group) if group.is_broken()))
    }
}

impl Group {
    /// Whether it, or a group in it, is written over several lines.
    pub fn is_broken(&self) -> bool {
        self.broken || self.items.iter().any(Item::is_broken)
    }

    pub fn is_block(&self) -> bool {
        self.open == "{" || self.open.is_empty()
    }
}

/// The white space before a token: comments, and blank lines.
#[derive(Clone, Debug, Default)]
struct Gap {
    /// On the line of the token before.
    beside: Option<String>,
    above: Vec<Above>,
    /// A blank line after the comments, right before the token.
    blank: bool,
}

impl Gap {
    fn is_plain(&self) -> bool {
        self.beside.is_none() && self.above.is_empty()
    }

    /// All comments, each on a line of its own.
    fn all_above(self) -> impl Iterator<Item = Above> {
        self.beside.into_iter().map(|text| Above { text, blank: false }).chain(self.above)
    }
}

struct Reader<'t> {
    text: &'t str,
    tokens: &'t [Token<'t>],
    at: usize,
}

/// The file as a group.
pub fn read(text: &str, tokens: &[Token<'_>]) -> Group {
    let mut reader = Reader { text, tokens, at: 0 };
    let mut file = Group { broken: true, ..Group::default() };
    reader.fill(&mut file);
    file
}

impl Reader<'_> {
    fn token(&self) -> &Token<'_> {
        &self.tokens[self.at]
    }

    /// What stands before the next token.
    fn gap(&self) -> Gap {
        let start = self.at.checked_sub(1).map_or(0, |before| self.tokens[before].span.end);
        let text = self.text[start..self.token().span.start].trim_start_matches('\u{feff}');
        let (mut gap, mut blank) = (Gap::default(), false);
        for (number, line) in text.split('\n').enumerate() {
            // The last piece stands on the token's own line.
            let (line, last) = (line.trim(), number == text.matches('\n').count());
            match (line.is_empty(), number) {
                (true, _) => blank |= number > 0 && !last,
                (false, 0) if start > 0 => gap.beside = Some(line.to_owned()),
                (false, _) => gap.above.push(Above { text: line.to_owned(), blank: std::mem::take(&mut blank) }),
            }
        }
        gap.blank = blank;
        gap
    }

    /// Reads items up to the group's closing bracket (or the end), which stays.
    fn fill(&mut self, group: &mut Group) {
        let mut item: Option<Item> = None;
        loop {
            let gap = self.gap();
            let (kind, starts_line) = (self.token().kind, self.token().starts_line);
            let ends = matches!(kind, Kind::Close | Kind::End);
            let separates = kind == Kind::Comma || kind == Kind::Semicolon;
            group.broken |= !gap.is_plain() || (starts_line && group.open == "{");
            group.broken |= starts_line && group.items.is_empty() && item.is_none() && !ends;
            let begins = item.as_ref().is_none_or(|item| group.is_block() && self.begins(item, &group.head));
            if ends || separates || begins {
                if let Some(mut done) = item.take() {
                    done.separated = separates;
                    group.items.push(done);
                }
                let above = attach(group, gap.clone());
                if ends {
                    group.dangling.extend(above);
                    let empty = group.items.is_empty() && group.dangling.is_empty() && group.opening.is_none();
                    group.broken &= !empty || group.open.is_empty();
                    return;
                }
                let blank = gap.blank && !group.items.is_empty() | !above.is_empty();
                match (group.dangling.is_empty(), separates) {
                    // Comments before a separator wait for the next item.
                    (_, true) => group.dangling.extend(above),
                    (_, false) => {
                        let above = std::mem::take(&mut group.dangling).into_iter().chain(above).collect();
                        item = Some(Item { above, blank, ..Item::default() });
                    }
                }
                if separates {
                    self.at += 1;
                    continue;
                }
            } else if let Some(item) = &mut item {
                item.above.extend(gap.all_above());
            }
            let head = item.as_ref().and_then(first_word);
            let node = self.node(head);
            item.get_or_insert_default().nodes.push(node);
        }
    }

    /// Whether the next token begins another item than `item`, in the block of `head`.
    fn begins(&self, item: &Item, head: &str) -> bool {
        let (token, last) = (self.token(), item.nodes.last());
        if head == "schedule" && token.starts_line && token.text != "{" {
            // A clause ends with its line, whatever stands there.
            return true;
        }
        let goes_on = token.text == "{" || token.text == "when" || joins(token.kind);
        let awaits = matches!(last, Some(Node::Leaf { kind, .. }) if joins(*kind));
        let closed = matches!(last, Some(Node::Group(group)) if group.open == "{");
        !goes_on && !awaits && (token.starts_line || (closed && token.kind == Kind::Word))
    }

    fn node(&mut self, head: Option<String>) -> Node {
        let token = self.token();
        let (kind, text) = (token.kind, token.text.to_owned());
        let glued = self.at.checked_sub(1).is_some_and(|before| self.tokens[before].span.end == token.span.start);
        self.at += 1;
        if kind != Kind::Open {
            return Node::Leaf { kind, text, glued };
        }
        let mut group = Group { open: text, head: head.unwrap_or_default(), ..Group::default() };
        self.fill(&mut group);
        group.close = self.token().text.to_owned();
        self.at += 1;
        Node::Group(group)
    }
}

fn first_word(item: &Item) -> Option<String> {
    match item.nodes.first() {
        Some(Node::Leaf { text, .. }) => Some(text.clone()),
        _ => None,
    }
}

/// Whether the token stands between two others of one item.
fn joins(kind: Kind) -> bool {
    matches!(kind, Kind::Assign | Kind::Compare | Kind::Operator | Kind::Dots)
}

/// Gives the comment beside the last item, or the opening bracket, to it; the others are above what follows.
fn attach(group: &mut Group, gap: Gap) -> Vec<Above> {
    let Gap { beside, above, .. } = gap;
    let Some(text) = beside else { return above };
    // A file has no opening bracket.
    let there = !(group.open.is_empty() && group.items.is_empty());
    let place = match group.items.last_mut() {
        Some(item) => &mut item.trailing,
        None => &mut group.opening,
    };
    if there && place.is_none() && group.dangling.is_empty() {
        *place = Some(text);
        return above;
    }
    std::iter::once(Above { text, blank: false }).chain(above).collect()
}
