//! Tokens keep their places through every copy.
use super::*;

#[test]
fn rows_go_in_and_come_back() {
    let pool = Pool::new();
    for tokens in [1, 15, 16, 17, 40] {
        let rows: Vec<f32> = (0..tokens * 5).map(|i| i as f32).collect();
        let act = Activation::from_rows(&pool, &rows, 5);
        assert_eq!(act.to_rows(), rows);
        let picked: Vec<usize> = (0..tokens).step_by(3).collect();
        let gathered = act.gather(&picked);
        assert_eq!(gathered.at(gathered.tokens() - 1, 4), act.at(picked[picked.len() - 1], 4));
        let back = gathered.scatter(&picked, tokens);
        for token in 0..tokens {
            let expected = if token % 3 == 0 { act.at(token, 2) } else { 0.0 };
            assert_eq!(back.at(token, 2), expected);
        }
    }
}
