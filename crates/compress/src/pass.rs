//! The way through a model that writes it anew: one unit after another is read, changed and
//! written.
//!
//! For each block, the calibration sequences go through it as it came, and the inputs of its layers
//! are summed up. Its matrices are changed. Then the sequences go through the changed block, so
//! that later blocks see what they will see (as in the programs of Wanda and SparseGPT). Evaluation
//! goes along the same way twice, with the weights as they came and as they are written, so it
//! costs no second copy of the model.

use crate::awq;
use crate::error::refuse;
use crate::inputs::{Inputs, Needs};
use crate::prune::{Pattern, PruneMethod, divides, prune};
use crate::quantise::{GroupedGrid, QuantiseMethod, quantise};
use crate::smooth;
use crate::source::{Source, store};
use crate::text::Sequences;
use crate::width::Smaller;
use crate::{CompressError, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;
use trainyard_autograd::{ParamId, Store};
use trainyard_engine::evaluate::Evaluation;
use trainyard_model::weights::{ExportOptions, Exported, PackedFormat, PackedMatrix, export, export_packed, is_packed};
use trainyard_model::{Model, ParameterSpec};
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::grid::rounded;
use trainyard_tensor::{Device, Tensor, TensorError};

/// A model that was written anew.
#[derive(Clone, Debug)]
pub struct Compressed {
    /// Its files.
    pub exported: Exported,
    /// The losses of the evaluation text before and after.
    pub losses: Option<[Evaluation; 2]>,
    /// Elements of the matrices of its blocks, and how many of them are zero.
    pub elements: u64,
    /// The zeros among them.
    pub zeros: u64,
}

/// A way through a model.
pub struct Pass<'a> {
    source: &'a Source,
    device: &'a Device,
    options: ExportOptions,
    calibration: Option<Sequences>,
    evaluation: Option<[Sequences; 2]>,
    /// The scaling of matrices before they are rounded.
    scaling: Scaling,
    /// The exponent of SmoothQuant.
    smoothing: f32,
    note: &'a mut dyn FnMut(&str),
    elements: u64,
    zeros: u64,
}

/// The scaling of columns before they are rounded.
#[derive(Clone, Copy, Debug)]
enum Scaling {
    /// None.
    Nothing,
    /// For the least error of weights on a grid.
    ForWeights(GroupedGrid),
    /// For the least error of inputs.
    ForInputs,
}

/// Changes one matrix, which is called by the first argument.
type Change<'c> = dyn FnMut(&Cpu, &str, &ParameterSpec, &mut [f32], &Inputs) -> Result<Option<PackedMatrix>> + 'c;

impl<'a> Pass<'a> {
    /// A way through `source`. `options` are those of the folder that it will write.
    pub fn new(
        source: &'a Source,
        device: &'a Device,
        options: ExportOptions,
        note: &'a mut dyn FnMut(&str),
    ) -> Pass<'a> {
        let (scaling, smoothing) = (Scaling::Nothing, smooth::EXPONENT);
        let (calibration, evaluation, elements, zeros) = (None, None, 0, 0);
        Pass { source, device, options, calibration, evaluation, scaling, smoothing, note, elements, zeros }
    }

    /// The same with sequences on which the inputs of layers are seen.
    pub fn calibrated(mut self, calibration: Option<Sequences>) -> Pass<'a> {
        self.calibration = calibration;
        self
    }

    /// The same with sequences whose loss is told before and after.
    pub fn evaluated(mut self, evaluation: Option<Sequences>) -> Pass<'a> {
        self.evaluation = evaluation.map(|sequences| [sequences.again(), sequences]);
        self
    }

    /// The same with another exponent of [`QuantiseMethod::SmoothQuant`].
    pub fn smoothing(mut self, exponent: f32) -> Pass<'a> {
        self.smoothing = exponent;
        self
    }

    /// Zeroes weights of the matrices of blocks and writes the model to `out`.
    ///
    /// # Errors
    /// A method that looks at inputs without calibration sequences; a pattern that does not divide
    /// rows; errors of reading and writing.
    pub fn prune(mut self, out: &Path, method: PruneMethod, pattern: Pattern) -> Result<Compressed> {
        let model = self.source.model();
        self.check_needs(method.needs())?;
        for (id, spec) in model.parameters().filter(|(id, _)| is_packed(model, *id)) {
            divides(pattern, &model.parameter_name(id).unwrap_or_default(), spec.row_elements())?;
        }
        let mut change = |cpu: &Cpu,
                          name: &str,
                          spec: &ParameterSpec,
                          weights: &mut [f32],
                          inputs: &Inputs|
         -> Result<Option<PackedMatrix>> {
            let width = spec.row_elements();
            // Each matrix of the files by itself: the rows of a fused one are compared with their
            // own.
            for source in &spec.sources {
                let rows = &mut weights[source.rows.start * width..source.rows.end * width];
                prune(cpu, name, rows, inputs, method, pattern)?;
            }
            Ok(None)
        };
        let options = self.options.clone();
        let exported = export(out, model, options, |unit, flat| {
            self.unit(model, unit, flat, method.needs(), &mut change).map(drop)
        });
        self.finish(exported)
    }

    /// Rounds the matrices of blocks to few bits and writes the model to `out`: packed, or if
    /// `dense` as floats that have the same values.
    ///
    /// # Errors
    /// A method that looks at inputs without calibration sequences; groups that do not divide rows;
    /// errors of reading and writing.
    pub fn quantise(
        mut self,
        out: &Path,
        method: QuantiseMethod,
        format: PackedFormat,
        dense: bool,
    ) -> Result<Compressed> {
        let model = self.source.model();
        self.check_needs(method.needs())?;
        check_groups(model, format)?;
        let is_transposed = |spec: &ParameterSpec| spec.sources.iter().any(|source| source.transposed);
        if dense && format.codes_inputs {
            return refuse("a folder of floats cannot say that inputs are rounded: write --form compressed-tensors");
        }
        if !dense && model.parameters().any(|(_, spec)| is_transposed(spec)) {
            return refuse(
                "files of this family hold transposed matrices, which compressed-tensors does not pack: write floats that \
                 have the same values, with --form dense (without rounded inputs)",
            );
        }
        let grid = GroupedGrid { format, dtype: self.options.dtype };
        self.scaling = match method {
            QuantiseMethod::Awq => Scaling::ForWeights(grid),
            QuantiseMethod::SmoothQuant => Scaling::ForInputs,
            QuantiseMethod::Nearest | QuantiseMethod::Gptq => Scaling::Nothing,
        };
        if format.codes_inputs {
            let packed: BTreeSet<ParamId> =
                model.parameters().map(|(id, _)| id).filter(|id| is_packed(model, *id)).collect();
            // What comes after sees the inputs as they are rounded.
            self.calibration.iter_mut().for_each(|calibration| calibration.round_inputs(packed.clone()));
            self.evaluation.iter_mut().for_each(|[_, after]| after.round_inputs(packed.clone()));
        }
        let mut change = |cpu: &Cpu, name: &str, _: &ParameterSpec, weights: &mut [f32], inputs: &Inputs| {
            quantise(cpu, name, weights, inputs, method, grid).map(Some)
        };
        let options = self.options.clone();
        let exported = match dense {
            true => export(out, model, options, |unit, flat| {
                self.unit(model, unit, flat, method.needs(), &mut change).map(drop)
            }),
            false => export_packed(out, model, options, format, |unit, flat| {
                self.unit(model, unit, flat, method.needs(), &mut change)
            }),
        };
        self.finish(exported)
    }

    /// Writes a smaller model to `out`.
    ///
    /// # Errors
    /// Errors of reading and writing.
    pub fn keep(mut self, out: &Path, smaller: &Smaller<'_>) -> Result<Compressed> {
        // Blocks that are dropped are not on the way, so what was before is run by itself.
        if let Some([before, _]) = &mut self.evaluation {
            run(self.source, self.device, before)?;
        }
        let (model, options) = (smaller.model(), self.options.clone());
        let values = |unit: usize| -> Result<Vec<f32>> {
            let mut values = vec![0.0; model.layout(unit, 1).elements()];
            smaller.read(unit, &mut values)?;
            Ok(values)
        };
        let exported = export(out, model, options, |unit, flat| -> Result<()> {
            let began = Instant::now();
            smaller.read(unit, flat)?;
            for index in matrices(model, unit) {
                let name = format!("{}.{}", model.units()[unit].name(), model.units()[unit].parameters()[index].name);
                let weights = &flat[model.layout(unit, 1).range(index)];
                check_finite(&name, weights)?;
                self.count(weights);
            }
            self.go_on(model, unit, flat, values, began)
        });
        self.finish(exported)
    }

    fn check_needs(&self, needs: Needs) -> Result<()> {
        match needs == Needs::Nothing || self.calibration.is_some() {
            true => Ok(()),
            false => refuse("this method looks at the inputs of layers: give it text with --calibration FILES"),
        }
    }

    fn finish(self, exported: Result<Exported, trainyard_model::ModelError>) -> Result<Compressed> {
        let exported = exported?;
        let losses = match &self.evaluation {
            Some([before, after]) => Some([before.losses()?, after.losses()?]),
            None => None,
        };
        Ok(Compressed { exported, losses, elements: self.elements, zeros: self.zeros })
    }

    /// Unit `unit` of `model`, that of the source.
    fn unit(
        &mut self,
        model: &Model,
        unit: usize,
        flat: &mut [f32],
        needs: Needs,
        change: &mut Change<'_>,
    ) -> Result<BTreeMap<usize, PackedMatrix>> {
        let began = Instant::now();
        let (source, device) = (self.source, self.device);
        let values = source.unit(unit)?;
        flat.copy_from_slice(&values);
        let runs = self.calibration.is_some() || self.evaluation.is_some();
        let as_it_came = match runs {
            true => Some(store(device, model, unit, &values, |unit| source.unit(unit))?),
            false => None,
        };
        drop(values);
        if let (Some([before, _]), Some(store)) = (&mut self.evaluation, &as_it_came) {
            before.advance(model, unit, store)?;
        }
        let layout = model.layout(unit, 1);
        let specs = model.units()[unit].parameters();
        let matrices = matrices(model, unit);
        let mut inputs = self.look(model, unit, as_it_came.as_ref(), &matrices, needs)?;
        drop(as_it_came);
        let cpu = cpu_of(device)?;
        match self.scaling {
            Scaling::Nothing => {}
            Scaling::ForWeights(grid) => awq::scale(cpu, model, unit, flat, &inputs, grid)?,
            Scaling::ForInputs => smooth::smooth(model, unit, flat, &inputs, self.smoothing),
        }
        let mut packed = BTreeMap::new();
        for index in &matrices {
            let spec = &specs[*index];
            let name = format!("{}.{}", model.units()[unit].name(), spec.name);
            let weights = &mut flat[layout.range(*index)];
            check_finite(&name, weights)?;
            let inputs = inputs.remove(index).unwrap_or_else(|| Inputs::new(spec.row_elements(), Needs::Nothing));
            packed.extend(change(cpu, &name, spec, weights, &inputs)?.map(|matrix| (*index, matrix)));
            self.count(weights);
        }
        self.go_on(model, unit, flat, |unit| source.unit(unit), began)?;
        Ok(packed)
    }

    /// Counts the weights of a matrix of a block, and the zeros among them.
    fn count(&mut self, weights: &[f32]) {
        self.elements += weights.len() as u64;
        self.zeros += weights.iter().filter(|weight| **weight == 0.0).count() as u64;
    }

    /// Rounds unit `unit` of the model that is written to the type of its files and runs it.
    /// `values` gives units that it borrows from.
    fn go_on(
        &mut self,
        model: &Model,
        unit: usize,
        flat: &mut [f32],
        values: impl Fn(usize) -> Result<Vec<f32>>,
        began: Instant,
    ) -> Result<()> {
        let dtype = self.options.dtype;
        flat.iter_mut().for_each(|x| *x = rounded(dtype, *x));
        let last = unit + 1 == model.units().len();
        if self.calibration.is_some() || self.evaluation.is_some() {
            let borrowed = |unit: usize| -> Result<Vec<f32>> {
                let mut values = values(unit)?;
                values.iter_mut().for_each(|x| *x = rounded(dtype, *x));
                Ok(values)
            };
            let changed = store(self.device, model, unit, flat, borrowed)?;
            if let Some(calibration) = self.calibration.as_mut().filter(|_| !last) {
                calibration.advance(model, unit, &changed)?;
            }
            if let Some([_, after]) = &mut self.evaluation {
                after.advance(model, unit, &changed)?;
            }
        }
        if unit > 0 && !last {
            (self.note)(&format!(
                "{} of {}: {:.1} s",
                model.units()[unit].name(),
                model.units().len() - 2,
                began.elapsed().as_secs_f64()
            ));
        }
        Ok(())
    }

    /// The statistics of the inputs of a block's matrices.
    fn look(
        &self,
        model: &Model,
        unit: usize,
        store: Option<&Store>,
        matrices: &[usize],
        needs: Needs,
    ) -> Result<BTreeMap<usize, Inputs>> {
        if needs == Needs::Nothing || matrices.is_empty() {
            return Ok(BTreeMap::new());
        }
        let (Some(calibration), Some(store)) = (&self.calibration, store) else { return Ok(BTreeMap::new()) };
        let specs = model.units()[unit].parameters();
        let sums = matrices.iter().map(|index| (*index, Inputs::new(specs[*index].row_elements(), needs)));
        let mut sums: BTreeMap<usize, Inputs> = sums.collect();
        let cpu = cpu_of(self.device)?;
        let mut failed = None;
        let mut observe = |id: ParamId, input: &Tensor| {
            if let Some(sum) = sums.get_mut(&(id.index as usize)).filter(|_| id.unit as usize == unit) {
                failed = failed.take().or(sum.add(cpu, input).err());
            }
            Ok(())
        };
        calibration.look(model, unit, store, &mut observe, |_, _| Ok(()))?;
        if let Some(error) = failed {
            return Err(error);
        }
        match sums.iter().find(|(_, sum)| sum.rows() == 0) {
            Some((index, _)) => refuse(format!(
                "no input of {}.{} was seen: a layer of this kind cannot be calibrated yet",
                model.units()[unit].name(),
                specs[*index].name
            )),
            None => Ok(sums),
        }
    }
}

/// The matrices of a unit, by the numbers of its parameters; none outside of blocks.
fn matrices(model: &Model, unit: usize) -> Vec<usize> {
    let parameters = 0..model.units()[unit].parameters().len();
    parameters.filter(|index| is_packed(model, ParamId::new(unit as u32, *index as u32))).collect()
}

/// Checks that weights are numbers.
fn check_finite(name: &str, weights: &[f32]) -> Result<()> {
    match weights.iter().all(|weight| weight.is_finite()) {
        true => Ok(()),
        false => refuse(format!("{name} holds NaN or infinities: this model has diverged")),
    }
}

/// The kernels of a device that has its data in this machine's memory.
pub(crate) fn cpu_of(device: &Device) -> Result<&Cpu> {
    let none = || TensorError::NoData { what: "compressing a model", shape: [].into() };
    device.as_cpu().ok_or_else(|| CompressError::Tensor(none()))
}

/// Checks that groups divide the rows of every matrix.
fn check_groups(model: &Model, format: PackedFormat) -> Result<()> {
    let Some(group) = format.group else { return Ok(()) };
    let matrices: Vec<_> = model.parameters().filter(|(id, _)| is_packed(model, *id)).collect();
    let widths: Vec<usize> = matrices.iter().map(|(_, spec)| spec.row_elements()).collect();
    let Some(at) = widths.iter().position(|width| !width.is_multiple_of(group)) else { return Ok(()) };
    let fits = |size: &usize| widths.iter().all(|width| width.is_multiple_of(*size));
    let others: Vec<String> = [256, 128, 64, 32, 16].into_iter().filter(fits).map(|size| size.to_string()).collect();
    refuse(format!(
        "groups of {group} do not divide the {} inputs of {}: {}--group 0 has one scale per row",
        widths[at],
        model.parameter_name(matrices[at].0).unwrap_or_default(),
        if others.is_empty() { String::new() } else { format!("--group {} would; ", others.join(" or ")) },
    ))
}

/// Runs all units of `source` on `sequences`.
///
/// # Errors
/// Errors of reading and of the units.
pub fn run(source: &Source, device: &Device, sequences: &mut Sequences) -> Result<()> {
    for unit in 0..source.model().units().len() {
        let store = store(device, source.model(), unit, &source.unit(unit)?, |unit| source.unit(unit))?;
        sequences.advance(source.model(), unit, &store)?;
    }
    Ok(())
}
