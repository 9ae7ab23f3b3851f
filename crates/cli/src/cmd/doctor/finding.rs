// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Result of one check of the command.

use serde::Serialize;

/// One check and its result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// Name of the check, which never changes.
    pub check: &'static str,
    pub grade: Grade,
    pub says: String,
    /// Command that remedies it.
    pub remedy: Option<String>,
}

/// Grade of a result.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// As it should be.
    Ok,
    /// Neither good nor bad.
    Info,
    /// Works, and could be better.
    Warning,
    /// Channels do not work without it.
    Failure,
}

impl Finding {
    pub fn new(check: &'static str, grade: Grade, says: impl Into<String>) -> Self {
        Self { check, grade, says: says.into(), remedy: None }
    }

    pub fn mend(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}
