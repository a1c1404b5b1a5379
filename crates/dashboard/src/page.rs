//! The page: its files are part of the program, so it needs no network and no folder.

use std::borrow::Cow;

const HTML: &str = include_str!("page/index.html");
const CSS: &str = include_str!("page/style.css");
const ICON: &str = include_str!("page/icon.svg");
/// The scripts share one scope and are joined in this order.
const SCRIPTS: [&str; 7] = [
    include_str!("page/format.js"),
    include_str!("page/source.js"),
    include_str!("page/chart.js"),
    include_str!("page/timeline.js"),
    include_str!("page/parts.js"),
    include_str!("page/views.js"),
    include_str!("page/main.js"),
];

/// A file of the page: its content type and content.
pub fn asset(path: &str) -> Option<(&'static str, Cow<'static, str>)> {
    Some(match path {
        "/" => ("text/html; charset=utf-8", Cow::Borrowed(HTML)),
        "/style.css" => ("text/css; charset=utf-8", Cow::Borrowed(CSS)),
        "/icon.svg" => ("image/svg+xml", Cow::Borrowed(ICON)),
        "/script.js" => ("text/javascript; charset=utf-8", Cow::Owned(script())),
        _ => return None,
    })
}

fn script() -> String {
    format!("\"use strict\";\n{}", SCRIPTS.join("\n"))
}

/// The page in one file, with its `data` inside.
pub fn with_data(title: &str, data: &serde_json::Value) -> String {
    // In a script, `</` could end it.
    let data = data.to_string().replace('<', "\\u003c");
    let style = format!("<style>{CSS}</style>");
    let script =
        format!("<script type=\"application/json\" id=\"data\">{data}</script>\n<script>{}</script>", script());
    HTML.replace("<link rel=\"icon\" href=\"icon.svg\">", "")
        .replace("<link rel=\"stylesheet\" href=\"style.css\">", &style)
        .replace("<script src=\"script.js\" defer></script>", "")
        .replace("<title>Trainyard</title>", &format!("<title>{}</title>", escaped(title)))
        .replace("</body>", &format!("{script}\n</body>"))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
