// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One function that a test covers, and one that none does.

/// Its mutants are caught.
pub fn a_test_covers(a: u32, b: u32) -> bool {
    a < b
}

/// Its mutants survive.
pub fn nobody_tests(a: u32) -> bool {
    a > 7
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_is_less_than_two_and_neither_two_nor_three() {
        assert!(super::a_test_covers(1, 2) && !super::a_test_covers(2, 2) && !super::a_test_covers(3, 2));
    }
}
