//! Statistics of the inputs of linear layers.

use crate::Result;
use trainyard_tensor::Tensor;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::gemm::{Accumulate, MatRef, weight_gradient};

/// The sums over a layer's inputs that a method needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// The norm of each column.
    Norms,
    /// The largest magnitude of each column.
    Largest,
    /// The products of all pairs of columns.
    Products,
}

/// Sums over the inputs X [rows, k] of a layer.
#[derive(Clone, Debug)]
pub struct Inputs {
    rows: usize,
    squares: Vec<f64>,
    products: Vec<f32>,
    largest: Vec<f32>,
}

impl Inputs {
    /// No inputs yet of a layer with `columns` of them.
    pub fn new(columns: usize, needs: Needs) -> Inputs {
        let products = if needs == Needs::Products { columns * columns } else { 0 };
        let largest = if needs == Needs::Largest { columns } else { 0 };
        Inputs { rows: 0, squares: vec![0.0; columns], products: vec![0.0; products], largest: vec![0.0; largest] }
    }

    /// Adds the rows of `x`.
    ///
    /// # Errors
    /// A tensor that is not in this machine's memory in f32.
    pub fn add(&mut self, cpu: &Cpu, x: &Tensor) -> Result<()> {
        let (values, columns) = (x.data::<f32>()?, self.squares.len());
        self.rows += x.rows();
        if !self.largest.is_empty() {
            for row in values.chunks_exact(columns) {
                self.largest.iter_mut().zip(row).for_each(|(most, x)| *most = most.max(x.abs()));
            }
        } else if self.products.is_empty() {
            for row in values.chunks_exact(columns) {
                self.squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
            }
        } else {
            let x = MatRef::new(values, x.rows(), columns);
            weight_gradient(cpu, x, x, &mut self.products, Accumulate::Add, None);
        }
        Ok(())
    }

    /// The number of columns.
    pub fn columns(&self) -> usize {
        self.squares.len()
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The norms of the columns, [k]; zeros if the largest magnitudes were asked for.
    pub fn norms(&self) -> Vec<f64> {
        let columns = self.squares.len();
        let square = |column: usize| match self.products.is_empty() {
            true => self.squares[column],
            false => f64::from(self.products[column * columns + column]),
        };
        (0..columns).map(|column| square(column).sqrt()).collect()
    }

    /// The largest magnitudes of the columns, [k]; empty if they were not asked for.
    pub fn largest(&self) -> &[f32] {
        &self.largest
    }

    /// X^T X, [k, k]; empty if only norms were asked for.
    pub fn products(&self) -> &[f32] {
        &self.products
    }
}
