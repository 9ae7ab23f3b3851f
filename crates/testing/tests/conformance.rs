// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on the harsh double.

mod support;

tombolo_testing::conformance!(support::Harsh::new());
