// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the command says of one thing that it looked at.

use serde::Serialize;

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// Its name, which stays.
    pub check: &'static str,
    pub grade: Grade,
    pub says: String,
    /// The command that mends it.
    pub remedy: Option<String>,
}

/// How it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// As it should be.
    Ok,
    /// Neither good nor bad.
    Info,
    /// It works, and could be better.
    Warning,
    /// Nothing works without it.
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
