//! `run --report FILE`: a picture of the first second of a container, as a page of HTML.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::events::Event;

/// The size of the picture, and of its margin.
const SIZE: (f64, f64) = (900.0, 320.0);
const MARGIN: f64 = 60.0;
/// Milliseconds that are shown at least.
const SECOND: f64 = 1000.0;

/// A start, and what happened to pages.
#[derive(Debug)]
pub struct Picture<'a> {
    /// What was started.
    pub title: String,
    /// When the command began, as [`crate::events::now`] tells time.
    pub begin: u64,
    /// Milliseconds until the tasks ran.
    pub first_instruction: f64,
    /// Milliseconds until the application answered.
    pub first_answer: f64,
    /// Pages of memory in all.
    pub pages: u64,
    /// What happened.
    pub events: &'a [Event],
}

/// How many pages were asked for and were there at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    milliseconds: f64,
    asked: u64,
    there: u64,
}

impl Picture<'_> {
    /// What is shown, as sums.
    fn points(&self) -> Vec<Point> {
        let mut last = Point { milliseconds: 0.0, asked: 0, there: 0 };
        let mut points = vec![last];
        for event in self.events {
            // A start takes less than 2^53 ns.
            #[expect(clippy::cast_precision_loss)]
            let milliseconds = event.at.saturating_sub(self.begin) as f64 / 1e6;
            let (asked, there) = (last.asked + event.asked, last.there + event.came);
            last = Point { milliseconds, asked, there };
            points.push(last);
        }
        points
    }

    /// The numbers behind the picture.
    fn figures(&self, points: &[Point]) -> Value {
        let shown = |point: &Point| json!([point.milliseconds, point.asked, point.there]);
        json!({
            "first_instruction_ms": self.first_instruction,
            "first_answer_ms": self.first_answer,
            "pages": self.pages,
            "points": points.iter().map(shown).collect::<Vec<_>>(),
        })
    }

    /// The page.
    #[must_use]
    pub fn html(&self) -> String {
        let points = self.points();
        let end = SECOND.max(self.first_answer * 1.1);
        let most =
            points.iter().map(|point| point.asked.max(point.there)).max().unwrap_or(0).max(1);
        let scale = Scale { end, most };
        let title = escaped(&self.title);
        let mut svg = String::new();
        scale.axes(&mut svg);
        scale.curve(&mut svg, "there", &points, |point| point.there);
        scale.curve(&mut svg, "asked", &points, |point| point.asked);
        scale.mark(&mut svg, "first instruction", self.first_instruction, 24.0);
        scale.mark(&mut svg, "first answer", self.first_answer, 44.0);
        // Inside of a script nothing is escaped; it must not end there.
        let figures = self.figures(&points).to_string().replace('<', "\\u003c");
        let (width, height) = SIZE;
        let memory = match self.pages {
            // It is sealed.
            0 => String::new(),
            pages => format!("{pages} pages of memory. "),
        };
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>{title}</title>\n\
             <style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n\
             <p>{memory}<span class=\"there\">Pages that are there</span>, \
             <span class=\"asked\">pages that somebody waited for</span>, by milliseconds since the \
             command began.</p>\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\">\n{svg}</svg>\n\
             <script type=\"application/json\" id=\"figures\">{figures}</script>\n</body></html>\n"
        )
    }
}

/// How the page looks.
const STYLE: &str = "body{font-family:sans-serif;max-width:60em;margin:2em auto}\
    svg{width:100%}text{font-size:12px}.line{fill:none;stroke-width:2}\
    .axis{stroke:#888}.mark{stroke:#888;stroke-dasharray:4}\
    .there{color:#1668b8;stroke:#1668b8}.asked{color:#c4420d;stroke:#c4420d}\
    span{stroke:none}";

/// From times and numbers of pages to places in the picture.
#[derive(Debug, Clone, Copy)]
struct Scale {
    /// The last millisecond.
    end: f64,
    /// The largest number of pages.
    most: u64,
}

impl Scale {
    fn x(&self, milliseconds: f64) -> f64 {
        MARGIN + (milliseconds / self.end).clamp(0.0, 1.0) * (SIZE.0 - 2.0 * MARGIN)
    }

    fn y(&self, pages: u64) -> f64 {
        // Pages are fewer than 2^53.
        #[expect(clippy::cast_precision_loss)]
        let part = pages as f64 / self.most as f64;
        SIZE.1 - MARGIN / 2.0 - part * (SIZE.1 - 1.5 * MARGIN)
    }

    fn axes(&self, svg: &mut String) {
        let (left, right, low, high) =
            (self.x(0.0), self.x(self.end), self.y(0), self.y(self.most));
        let _ = writeln!(
            svg,
            "<path class=\"axis line\" d=\"M{left:.1} {high:.1}V{low:.1}H{right:.1}\"/>\n\
             <text x=\"4\" y=\"{:.1}\">{}</text>\n<text x=\"{:.1}\" y=\"{:.1}\">{:.0} ms</text>",
            high + 4.0,
            self.most,
            right - 20.0,
            low + 16.0,
            self.end
        );
    }

    /// A line that goes up where something happens.
    fn curve(&self, svg: &mut String, class: &str, points: &[Point], of: fn(&Point) -> u64) {
        let mut path = format!("M{:.1} {:.1}", self.x(0.0), self.y(0));
        for point in points {
            let _ = write!(path, "H{:.1}V{:.1}", self.x(point.milliseconds), self.y(of(point)));
        }
        let _ =
            writeln!(svg, "<path class=\"{class} line\" d=\"{path}H{:.1}\"/>", self.x(self.end));
    }

    fn mark(&self, svg: &mut String, what: &str, milliseconds: f64, height: f64) {
        let (x, low) = (self.x(milliseconds), self.y(0));
        let _ = writeln!(
            svg,
            "<path class=\"mark line\" d=\"M{x:.1} {:.1}V{low:.1}\"/>\n\
             <text x=\"{:.1}\" y=\"{height:.1}\">{what}: {milliseconds:.0} ms</text>",
            height - 10.0,
            x + 4.0
        );
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use torpor_blobs::traffic::Traffic;

    fn event(at: u64, asked: u64, came: u64) -> Event {
        Event { at, asked, unforeseen: false, came, traffic: Traffic::default() }
    }

    fn picture(events: &[Event]) -> Picture<'_> {
        let title = "a <b> & c".to_owned();
        let (first_instruction, first_answer) = (40.0, 90.0);
        Picture { title, begin: 5_000_000, first_instruction, first_answer, pages: 100, events }
    }

    #[test]
    fn pages_are_added_up() {
        let events = [event(6_000_000, 3, 0), event(7_000_000, 0, 10), event(8_500_000, 1, 2)];
        let points = picture(&events).points();
        let last = Point { milliseconds: 3.5, asked: 4, there: 12 };
        assert_eq!((points.len(), points[3]), (4, last));
        let html = picture(&events).html();
        assert!(html.contains("<title>a &lt;b&gt; &amp; c</title>"), "{html}");
        assert!(html.contains("first answer: 90 ms"), "{html}");
        let (_, rest) = html.split_once("id=\"figures\">").unwrap();
        let figures: Value = serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap();
        assert_eq!(figures["points"][3], json!([3.5, 4, 12]));
    }

    #[test]
    fn a_start_without_events_has_a_picture() {
        assert!(picture(&[]).html().contains("</svg>"));
    }
}
