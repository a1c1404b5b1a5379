//! Linear equations of a few unknowns.

/// Solves `matrix` · x = `right` by Gaussian elimination with pivots. The matrix is positive
/// definite, so there is a solution.
pub fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let n = right.len();
    for column in 0..n {
        let pivot = (column..n)
            .max_by(|a, b| matrix[*a][column].abs().total_cmp(&matrix[*b][column].abs()))
            .expect("there are rows left");
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        for row in column + 1..n {
            let factor = matrix[row][column] / matrix[column][column];
            for k in column..n {
                matrix[row][k] -= factor * matrix[column][k];
            }
            right[row] -= factor * right[column];
        }
    }
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|k| matrix[row][k] * right[k]).sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::solve;

    #[test]
    fn equations_are_solved_whatever_their_order() {
        let matrix = vec![vec![0.0, 2.0, 1.0], vec![2.0, 1.0, 0.0], vec![1.0, 0.0, 3.0]];
        let x = solve(matrix, vec![7.0, 4.0, 10.0]);
        for (x, wanted) in x.into_iter().zip([1.0, 2.0, 3.0]) {
            assert!((x - wanted).abs() < 1e-12);
        }
    }
}
