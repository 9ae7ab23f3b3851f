// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reports of the example program: a report is complete and well-formed, it can be made again from its lines alone, and
//! each failure is reported in one line and leaves nothing behind.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Place, program, text};
use roxmltree::Document;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tombolo_bench::Measurement;
use tombolo_bench::report::{Record, Records};

/// Charts of the whole suite, and a transport that each must show.
const CHARTS: [(&str, &str); 14] = [
    ("throughput", "UNIX seqpacket"),
    ("throughput-log", "memcpy of one core"),
    ("rate", "Tombolo messages"),
    ("latency-spin", "one cache line"),
    ("latency-sleep-think-30us", "eventfd"),
    ("latency-sleep-same-cpu-think-30us", "pipe"),
    ("latency-sleep-neighbour", "eventfd"),
    ("load-10000", "UNIX stream"),
    ("load-100000", "TCP, loopback"),
    ("cpu", "pipe"),
    ("switches", "TCP, loopback"),
    ("channels", "UNIX stream"),
    ("setup", "Tombolo stream, 4 KiB ring"),
    ("memory", "Tombolo stream"),
];

/// Returns the names of a chart's curves or bars.
fn names(svg: &str) -> Vec<String> {
    let document = Document::parse(svg).unwrap_or_else(|e| panic!("not well-formed: {e}\n{svg}"));
    assert_eq!(document.root_element().tag_name().namespace(), Some("http://www.w3.org/2000/svg"));
    let named = document.descendants().filter(|node| node.attribute("class") == Some("name"));
    named.filter_map(|node| node.text().map(String::from)).collect()
}

/// Checks that a page refers to nothing outside itself, and that its charts are well-formed. Returns their number.
fn charts_of_page(html: &str) -> usize {
    for needy in ["http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link", "<iframe", "<object"] {
        assert!(!html.contains(needy), "the page refers to something else: {needy}");
    }
    assert!(html.contains("prefers-color-scheme:dark") && html.contains("charset=\"utf-8\""));
    let charts: Vec<_> = html.match_indices("<svg ").collect();
    for (at, _) in &charts {
        let end = html[*at..].find("</svg>").unwrap() + "</svg>".len();
        Document::parse(&html[*at..*at + end]).unwrap();
    }
    charts.len()
}

fn read(dir: &Path, name: &str) -> String {
    fs::read_to_string(dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Returns a line as recorded, with some of it changed.
fn line(transport: &str, size: usize, median: f64, more: &str) -> String {
    format!(
        r#"{{"test":"throughput","transport":"{transport}","mode":"stream","size":{size},"channels":1,"unit":"bytes/s","median":{median},"min":{0},"max":{1},"runs":3,"placement":"near","cpu":"cross"{more}}}"#,
        median * 0.9,
        median * 1.1
    )
}

/// Reports in a folder of their own; the program's scratch files are not among them.
struct Desk(TempDir);

impl Desk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, lines: &[String]) -> String {
        fs::write(self.path(name), lines.join("\n")).unwrap();
        self.path(name).display().to_string()
    }

    /// Renders the recorded lines; starts no worker.
    fn render(&self, report: &str, from: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.arg("--report").arg(self.path(report));
        from.iter().for_each(|file| _ = command.args(["--from", file]));
        command.stdin(Stdio::null()).output().unwrap()
    }
}

#[test]
fn report_of_the_quick_suite_is_complete_and_leaves_nothing() {
    let (place, desk) = (Place::new("report"), Desk::new());
    let dir = desk.path("there/deep");
    let output = place.run(&format!("--report {} --quick --seconds 0.01 --runs 1", dir.display()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    place.assert_nothing_left();

    let mut measured: Vec<Measurement> = Vec::new();
    let mut about = 0;
    for line in read(&dir, "results.jsonl").lines() {
        match serde_json::from_str(line).unwrap() {
            Record::About { about: it } => about += usize::from(it.command.contains("--quick") && it.cpus >= 1),
            Record::Skip { skip } => assert!(!skip.failed, "{skip}"),
            Record::Measurement(m) => measured.push(*m),
        }
    }
    assert_eq!(about, 1);
    for m in &measured {
        assert!(m.min <= m.median && m.median <= m.max && m.runs >= 1, "{m:?}");
    }
    for (chart, transport) in CHARTS {
        let names = names(&read(&dir, &format!("{chart}.svg")));
        assert!(names.iter().any(|name| name == transport), "{chart} shows {names:?}");
        assert!(names.iter().any(|name| name.starts_with("Tombolo stream")), "{chart} shows {names:?}");
    }
    assert_eq!(charts_of_page(&read(&dir, "index.html")), CHARTS.len());
    let files = fs::read_dir(&dir).unwrap().count();
    assert_eq!(files, CHARTS.len() + 3, "more files than a report has");
    let report = read(&dir, "report.txt");
    assert!(report.contains("CPU seconds per GiB") && report.contains("command"), "{report}");

    // The same again from the lines alone, beside a rival's.
    let rival = desk.file("rival.jsonl", &[line("rtrb", 64, 9e9, "")]);
    let lines = dir.join("results.jsonl").display().to_string();
    let output = desk.render("again", &[&lines, &rival]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(names(&read(&desk.path("again"), "throughput.svg")).contains(&"rtrb, two threads".into()));
    assert_eq!(read(&desk.path("again"), "cpu.svg"), read(&dir, "cpu.svg"));
    assert_eq!(Records::read(&desk.path("again/results.jsonl")).unwrap().measurements.len(), measured.len() + 1);

    // A second measurement into one directory would lose the first.
    let output = place.run(&format!("--report {} --quick", dir.display()));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("is there already"), "{}", text(&output.stderr));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), files);
}

#[test]
fn report_of_two_files_shows_the_first_and_says_how_they_compare() {
    let desk = Desk::new();
    let first = desk.file("first.jsonl", &[line("tombolo", 64, 1e9, ""), line("tombolo", 4096, 5e10, "")]);
    let second = desk.file("second.jsonl", &[line("tombolo", 64, 5e8, ""), line("iceoryx2", 64, 2e8, "")]);
    assert!(desk.render("out", &[&first, &second]).status.success());
    let records = Records::read(&desk.path("out/results.jsonl")).unwrap();
    let medians: Vec<_> = records.measurements.iter().map(|m| (m.transport.as_str(), m.median)).collect();
    assert_eq!(medians, [("tombolo", 1e9), ("tombolo", 5e10), ("iceoryx2", 2e8)]);
    let said = "second.jsonl adds 1 results. Of 1 that it has as well as the files before it, which are shown, its own are \
                0.50 times theirs";
    assert!(read(&desk.path("out"), "report.txt").contains(said));
    assert!(read(&desk.path("out"), "index.html").contains(said));
}

#[test]
fn report_of_two_placements_warns_and_draws_the_fewer_hollow() {
    let desk = Desk::new();
    let near = desk.file("near.jsonl", &[line("tombolo", 64, 1e9, ""), line("tombolo", 4096, 5e10, "")]);
    let far = [line("tombolo", 64, 5e8, ""), line("rtrb", 64, 2e8, "")].map(|line| line.replace("near", "far"));
    let far = desk.file("far.jsonl", &far);
    assert!(desk.render("out", &[&near, &far]).status.success());
    let html = read(&desk.path("out"), "index.html");
    assert!(html.contains("1 of them were taken while the CPUs were elsewhere"), "{html}");
    assert!(html.contains("Of 3 results, 2 with near CPUs, 1 with CPUs far apart."), "{html}");
    let svg = read(&desk.path("out"), "throughput.svg");
    assert_eq!(svg.matches(r#"class="back s"#).count(), 1, "{svg}");
    assert!(read(&desk.path("out"), "report.txt").contains("200 MB/s*"));
}

#[test]
fn report_of_names_that_would_break_a_page_is_well_formed() {
    let desk = Desk::new();
    let evil = r#"</svg><script>alert(1)</script>&\u0000\u0007\"'"#;
    let lines = [
        line(evil, 64, 1e9, &format!(r#","variant":"{evil}""#)),
        line(evil, 4096, 1e10, ""),
        line("zero", 64, 0.0, ""),
        line("less than nothing", 4096, -5.0, ""),
        format!(r#"{{"skip":{{"test":"rate","transport":"{evil}","size":8,"reason":"{evil}","failed":true}}}}"#),
    ];
    let file = desk.file("evil.jsonl", &lines);
    let output = desk.render("out", &[&file]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(charts_of_page(&read(&desk.path("out"), "index.html")), 2);
    assert_eq!(names(&read(&desk.path("out"), "throughput-log.svg")).len(), 3);
}

#[test]
fn canary_page_that_refers_elsewhere_or_chart_that_is_broken_is_noticed() {
    let good = "<p>prefers-color-scheme:dark charset=\"utf-8\"</p><svg ></svg>";
    assert_eq!(charts_of_page(good), 1);
    for bad in [format!("{good}<img src=x>"), format!("{good}<a href=x>"), good.replace("></svg>", "><g></svg>")] {
        assert!(std::panic::catch_unwind(|| charts_of_page(&bad)).is_err(), "{bad}");
    }
}

#[test]
fn report_that_cannot_be_made_is_refused_in_one_line_and_leaves_nothing() {
    let (place, desk) = (Place::new("refused"), Desk::new());
    let good = desk.file("good.jsonl", &[line("tombolo", 64, 1e9, "")]);
    let broken = desk.file("broken.jsonl", &[line("tombolo", 64, 1e9, ""), "{\"test\":\"speed\"}".into()]);
    let empty = desk.file("empty.jsonl", &[]);
    let binary = desk.path("binary.jsonl");
    fs::write(&binary, [0xff, 0xfe, 0]).unwrap();
    let binary = binary.display().to_string();
    let (missing, folder) = (desk.path("missing").display().to_string(), desk.0.path().display().to_string());
    for (from, words) in [
        (&missing, "cannot read"),
        (&folder, "cannot read"),
        (&binary, "cannot read"),
        (&broken, "broken.jsonl:2: not a result"),
        (&empty, "no results in it"),
    ] {
        let output = desk.render("out", &[&good, from]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains(words) && said.starts_with("bench: "), "{said}");
        assert!(!desk.path("out").exists());
    }
    // A directory that cannot be made, because it is below a file.
    for more in ["--quick".into(), format!("--from {good}")] {
        let output = place.run(&format!("--report {good}/sub {more}"));
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains("cannot make the directory"), "{said}");
    }
    for (nonsense, words) in [
        (format!("--quick --report {0} --from {good}", desk.path("out").display()), "cannot be used with"),
        (format!("--report {} --size 64", desk.path("out").display()), "cannot be used with"),
        ("--quick".into(), "--report <DIR>"),
        (format!("--from {good}"), "--report <DIR>"),
    ] {
        let output = place.run(&nonsense);
        assert_eq!(output.status.code(), Some(2), "{nonsense}");
        assert!(text(&output.stderr).contains(words), "{nonsense}: {}", text(&output.stderr));
        assert!(!desk.path("out").exists());
    }
    place.assert_nothing_left();
}

#[test]
fn report_of_nothing_says_why_and_leaves_no_directory() {
    let desk = Desk::new();
    let mut command = Command::new(program());
    // The programs that make namespaces are not found.
    command.env("PATH", desk.0.path()).args(["--quick", "--transport", "tcp-veth", "--report"]).arg(desk.path("out"));
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).starts_with("SKIP throughput tcp-veth: "), "{}", text(&output.stderr));
    assert!(!desk.path("out").exists());
}

#[test]
fn report_with_a_worker_killed_says_what_failed_and_leaves_nothing_else() {
    let (place, desk) = (Place::new("report-killed"), Desk::new());
    let dir = desk.path("out");
    let driver =
        place.start(&format!("--report {} --quick --runs 1 --transport pipe,tcp-veth --seconds 0.3", dir.display()));
    for worker in place.await_sampling() {
        // A worker that is already gone with the other is as good.
        let _ = kill_process(worker, Signal::KILL);
    }
    let output = driver.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.lines().any(|line| line.starts_with("FAIL throughput ")), "{said}");
    let html = read(&dir, "index.html");
    assert!(html.contains("Not measured") && html.contains("FAIL throughput "));
    charts_of_page(&html);
    place.assert_nothing_left();
}

#[test]
fn report_interrupted_leaves_the_lines_so_far_and_they_can_be_rendered() {
    let (place, desk) = (Place::new("report-int"), Desk::new());
    let dir = desk.path("out");
    let mut driver =
        place.start(&format!("--report {} --quick --transport tombolo,pipe,tcp-veth --seconds 0.05", dir.display()));
    let deadline = Instant::now() + Duration::from_secs(300);
    let measured = || fs::read_to_string(dir.join("results.jsonl")).unwrap_or_default();
    while !measured().contains("\"transport\":\"pipe\"") {
        assert!(Instant::now() < deadline, "no results after five minutes");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&driver), Signal::TERM).unwrap();
    driver.wait().unwrap();
    place.assert_nothing_left();
    let file = dir.join("results.jsonl").display().to_string();
    let output = desk.render("again", &[&file]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(names(&read(&desk.path("again"), "throughput.svg")).contains(&"pipe".into()));
}
