// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on the harsh double.

mod support;

tombolo_domain::conformance!(support::Harsh::new());
