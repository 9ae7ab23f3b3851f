// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the administrator's log: events of `tracing`, one line each on standard error.
//!
//! Lines contain no characters on which a terminal would act, and their rate is limited. An event with the field
//! `stranger` reports what a domain or user did: each of them has its own share of the lines, and cannot use up that of
//! others. In the journal a line has a level; the journal adds the time. No thread waits for whoever reads the log.

mod budget;
mod queue;

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    fmt::{self, Write as _},
    io::{self, Write},
    os::fd::AsFd,
    panic,
    sync::{Mutex, OnceLock},
    time::{Duration, Instant},
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
};

use tombolo_os::lock::lock;

use budget::LineBudget;
use queue::LineQueue;

/// Time for which the process waits at its end for lines that are not read.
const LINGER: Duration = Duration::from_secs(1);
/// Queue of this process's lines.
static LINES: OnceLock<LineQueue> = OnceLock::new();

/// Environment variable with the filter that is used if the command line has none.
pub const VARIABLE: &str = "TOMBOLO_LOG";
/// Environment variable in which a service manager names the journal's stream, if standard error is the journal.
const JOURNAL: &str = "JOURNAL_STREAM";

/// Parses what is to be logged: a level, or one for each part of the program, as in `info,tombolo_broker::host=debug`.
///
/// # Errors
/// The text is neither.
pub fn parse_filter(text: &str) -> Result<Targets, String> {
    let remedy =
        "`error`, `warn`, `info`, `debug`, `trace` or `off`, or one for each part: `info,tombolo_broker::host=debug`";
    // The parser would log all levels of a part without a level, and take a misspelt level for such a part.
    let level = |part: &str| part.rsplit('=').next().unwrap_or_default().trim().to_owned();
    let is_sound = text.split(',').map(level).all(|it| !it.is_empty() && it.parse::<LevelFilter>().is_ok());
    let filter = text.parse().ok().filter(|_| is_sound);
    filter.ok_or_else(|| format!("{text:?} is no level: {remedy}"))
}

/// Logs from now on what `filter` lets through. Without one, uses the filter in [`VARIABLE`], or else level `info`.
///
/// # Errors
/// The variable is invalid, or no thread can be made to write the lines.
pub fn start(filter: Option<Targets>) -> Result<(), String> {
    let filter = match (filter, std::env::var(VARIABLE)) {
        (Some(filter), _) => filter,
        (None, Ok(text)) => parse_filter(&text).map_err(|why| format!("{VARIABLE}: {why}"))?,
        (None, Err(_)) => Targets::new().with_default(LevelFilter::INFO),
    };
    let is_journal = std::env::var(JOURNAL).is_ok_and(|stream| is_stream(io::stderr(), &stream));
    let lines = LineQueue::start(io::stderr()).map_err(|error| format!("no thread writes the log: {error}"))?;
    let lines = LINES.get_or_init(|| lines);
    // Rust's own hook would write from the thread that panics.
    panic::set_hook(Box::new(|panic| {
        let (trace, thread) = (Backtrace::capture(), std::thread::current());
        let thread = thread.name().unwrap_or("nameless").to_owned();
        let trace = if trace.status() == BacktraceStatus::Captured { format!("{trace}\n") } else { String::new() };
        lines.push(format!("tombolod: thread {thread} {panic}\n{trace}").as_bytes());
    }));
    let layer = LineLayer::new(is_journal, || lines.clone());
    // If this process already has a subscriber, an embedding program set it, and it stays.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer.with_filter(filter)));
    Ok(())
}

/// Waits at the end of the process, for a limited time, until all lines are written.
pub fn finish() {
    LINES.get().into_iter().for_each(|lines| lines.finish(LINGER));
}

/// Returns whether a descriptor is the named stream: `device:inode`.
fn is_stream(fd: impl AsFd, named: &str) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| format!("{}:{}", stat.st_dev, stat.st_ino) == named)
}

/// Writes one line for each event.
struct LineLayer<W> {
    has_level: bool,
    budget: Mutex<LineBudget>,
    writer: W,
}

impl<W> LineLayer<W> {
    fn new(has_level: bool, writer: W) -> Self {
        Self { has_level, budget: Mutex::new(LineBudget::new(Instant::now())), writer }
    }
}

/// The name and fields of a span, as they are appended to a line.
struct About(String);

/// The message of an event, and the stranger to whom it is charged.
#[derive(Default)]
struct Parts {
    message: String,
    stranger: Option<String>,
}

impl Visit for Parts {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "stranger" => self.stranger = Some(value.into()),
            _ => self.record_debug(field, &format_args!("{value}")),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.message, "{value:?}");
        }
    }
}

/// The fields of a span, as `name=value`.
struct Fields(String);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl<S, W, O> Layer<S> for LineLayer<W>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: Fn() -> O + 'static,
    O: Write,
{
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        let mut fields = Fields(attributes.metadata().name().into());
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(About(fields.0));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut parts = Parts::default();
        event.record(&mut parts);
        let whose = parts.stranger.as_deref();
        let mut budget = lock(&self.budget);
        let Some(left_out) = budget.take_permit(whose, Instant::now()) else { return };
        // Still locked, so that lines of several threads do not mix, and the count of omitted lines comes first.
        let mut written = (self.writer)();
        if left_out != 0 {
            let about = whose.map(|whose| format!(" about {whose}")).unwrap_or_default();
            let many = format!("{left_out} lines more{about} were left out, as there were too many at once");
            let _ = written.write_all(line(self.has_level, Level::WARN, &many).as_bytes());
        }
        let mut text = parts.message;
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(About(about)) = span.extensions().get() {
                let _ = write!(text, " ({about})");
            }
        }
        let _ = written.write_all(line(self.has_level, *event.metadata().level(), &text).as_bytes());
    }
}

/// Formats a line, to be written in one piece.
fn line(has_level: bool, level: Level, text: &str) -> String {
    // Numbers of syslog.
    let number = match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    };
    let level = if has_level { format!("<{number}>") } else { String::new() };
    format!("{level}tombolod: {}\n", text.replace(char::is_control, "?"))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;

    /// Collects what was written.
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the lines that `events` write.
    pub(crate) fn written(has_level: bool, filter: &str, events: impl FnOnce()) -> Vec<String> {
        let (sink, filter) = (Sink::default(), parse_filter(filter).unwrap());
        let writer = sink.clone();
        let layer = LineLayer::new(has_level, move || writer.clone()).with_filter(filter);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), events);
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(String::from).collect()
    }

    #[test]
    fn line_says_what_happened_and_where_and_in_the_journal_how_bad_it_is() {
        let events = || {
            let link = tracing::error_span!("link", number = 7, peer = "b");
            let _in = link.enter();
            tracing::warn!(stranger = "b", "it \u{1b}[31m says\nnonsense");
            tracing::info!("ready");
            tracing::debug!("of no use to most");
        };
        assert_eq!(
            written(false, "info", events),
            ["tombolod: it ?[31m says?nonsense (link number=7 peer=b)", "tombolod: ready (link number=7 peer=b)"]
        );
        let levels: Vec<_> = written(true, "debug", events).iter().map(|line| line[..12].to_owned()).collect();
        assert_eq!(levels, ["<4>tombolod:", "<6>tombolod:", "<7>tombolod:"]);
    }

    #[test]
    fn stranger_that_causes_lines_without_end_takes_none_of_anybody_else() {
        let lines = written(false, "info", || {
            for _ in 0..1000 {
                tracing::warn!(stranger = "a", "a: nonsense");
            }
            tracing::warn!(stranger = "b", "b: once");
            tracing::info!("of its own");
        });
        assert_eq!(lines.iter().filter(|line| line.contains("a: nonsense")).count(), 20);
        assert_eq!(lines[20..], ["tombolod: b: once", "tombolod: of its own"]);
    }

    #[test]
    fn part_of_the_program_may_have_a_level_of_its_own() {
        let lines = written(false, "warn,tombolo_broker=debug", || {
            tracing::info!("here");
            tracing::info!(target: "elsewhere", "there");
        });
        assert_eq!(lines, ["tombolod: here"]);
        for text in ["loud", "", "info,", "info,tombolo_broker", "tombolo_broker=loud"] {
            assert!(parse_filter(text).unwrap_err().contains("`debug`"), "{text}");
        }
    }

    #[test]
    fn journal_is_the_stream_that_the_service_manager_names() {
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        assert!(is_stream(&file, &format!("{}:{}", stat.st_dev, stat.st_ino)));
        assert!(!is_stream(&file, "1:2") && !is_stream(&file, ""));
    }
}
