//! One self-contained page of HTML: the data as JSON, the script and the style in it, nothing loaded from elsewhere.

use super::scene::Scene;
use serde_json::json;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The page for one scene, or for two to compare.
pub fn page(scenes: &[Scene]) -> String {
    let title: Vec<&str> = scenes.iter().map(|s| s.schedule.as_str()).collect();
    let file = scenes.first().map_or("", |s| s.file.as_str());
    let title = escaped(&format!("{}: {file}", title.join(" and ")));
    // In JSON `<` occurs in strings only; written so, no text of a spec ends the script element.
    let data = json!({ "scenes": scenes }).to_string().replace('<', "\\u003c");
    let parts = [("{title}", title.as_str()), ("{style}", STYLE), ("{data}", data.as_str()), ("{script}", SCRIPT)];
    let mut rest = TEMPLATE;
    let mut page = String::with_capacity(TEMPLATE.len() + STYLE.len() + data.len() + SCRIPT.len());
    for (mark, content) in parts {
        let (before, after) = rest.split_once(mark).expect("the template holds each mark once, in this order");
        page.push_str(before);
        page.push_str(content);
        rest = after;
    }
    page + rest
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
