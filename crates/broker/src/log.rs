// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines for the administrator, so many in a time.

mod budget;

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use budget::LineBudget;

/// A line of the broker's own for the administrator, on standard error: the journal adds the time. It is without what a terminal
/// would act on, and there are so many in a time.
pub fn log(line: &str) {
    write(None, line);
}

/// The same of what a stranger did: a domain, or a user. Each has so many lines in a time, and takes none of anybody else's.
pub fn log_of(whose: &str, line: &str) {
    write(Some(whose), line);
}

fn write(whose: Option<&str>, line: &str) {
    use std::io::Write;
    static LINES: Mutex<Option<LineBudget>> = Mutex::new(None);
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let Some(left_out) = lines.get_or_insert_with(|| LineBudget::new(now)).take_permit(whose, now) else { return };
    let mut written = std::io::stderr();
    if left_out != 0 {
        let about = whose.map(|whose| format!(" about {whose}")).unwrap_or_default();
        let many = format!("{left_out} lines more{about} were left out, as there were too many at once");
        let _ = writeln!(written, "tombolod: {}", many.replace(char::is_control, "?"));
    }
    let _ = writeln!(written, "tombolod: {}", line.replace(char::is_control, "?"));
}
