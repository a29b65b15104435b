//! The schedules that come with the language, written in it.

use crate::ast::Item;
use crate::resolve::{Context, lower};
use crate::schedule::Schedule;

/// Name and source. A new schedule is a file in `library/` and a line here.
const FILES: [(&str, &str); 17] = [
    ("gpipe", include_str!("../library/gpipe.pace")),
    ("one_f_one_b", include_str!("../library/one_f_one_b.pace")),
    ("zb_h1", include_str!("../library/zb_h1.pace")),
    ("zb_h2", include_str!("../library/zb_h2.pace")),
    ("interleaved_1f1b", include_str!("../library/interleaved_1f1b.pace")),
    ("interleaved_1f1b_torch", include_str!("../library/interleaved_1f1b_torch.pace")),
    ("looped_bfs", include_str!("../library/looped_bfs.pace")),
    ("interleaved_zb", include_str!("../library/interleaved_zb.pace")),
    ("zb_v", include_str!("../library/zb_v.pace")),
    ("v_half", include_str!("../library/v_half.pace")),
    ("v_min", include_str!("../library/v_min.pace")),
    ("dualpipe_v", include_str!("../library/dualpipe_v.pace")),
    ("dualpipe", include_str!("../library/dualpipe.pace")),
    ("chimera", include_str!("../library/chimera.pace")),
    ("async_1f1b", include_str!("../library/async_1f1b.pace")),
    ("pipedream", include_str!("../library/pipedream.pace")),
    ("pipedream_2bw", include_str!("../library/pipedream_2bw.pace")),
];

/// All names, in the order of the documentation.
pub fn names() -> Vec<&'static str> {
    FILES.iter().map(|(name, _)| *name).collect()
}

/// The text of a library schedule's file.
pub fn source(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}

/// A library schedule; its spans point into [`source`].
pub fn schedule(name: &str) -> Option<Schedule> {
    let (file, _) = crate::parse(source(name)?);
    let written = file.items.iter().find_map(|item| match item {
        Item::Schedule(schedule) if schedule.name.text == name => Some(schedule),
        _ => None,
    })?;
    lower(&mut Context::default(), written, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_gives_its_schedule() {
        for name in names() {
            let text = source(name).expect("listed");
            let (file, found) = crate::parse(text);
            assert_eq!(found, [], "{name}");
            assert_eq!(file.items.len(), 1, "{name}");
            assert!(text.starts_with("//"), "{name} says what it is");
            assert!(schedule(name).is_some_and(|s| s.library && s.name == name), "{name}");
        }
    }
}
