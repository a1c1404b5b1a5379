//! Eight-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1): E4M3 for
//! precision, E5M2 for range.
//!
//! Rounding is to nearest, ties to even, and saturates: a value beyond the largest number becomes
//! the largest, as in the conversions that GPUs use after scaling a tensor. NaN stays NaN. Codes
//! are those of the hardware: sign, exponent, mantissa from the highest bit down.

/// A format of eight bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fp8 {
    /// Four bits of exponent with bias 7, three of mantissa; no infinities, so that the largest
    /// number is 448.
    E4M3,
    /// Five bits of exponent with bias 15, two of mantissa, laid out like the upper half of an IEEE
    /// binary16; the largest number is 57344.
    E5M2,
}

impl Fp8 {
    /// Both.
    pub const ALL: [Fp8; 2] = [Fp8::E4M3, Fp8::E5M2];

    /// `e4m3`, `e5m2`.
    pub const fn name(self) -> &'static str {
        match self {
            Fp8::E4M3 => "e4m3",
            Fp8::E5M2 => "e5m2",
        }
    }

    /// Bits of mantissa.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Fp8::E4M3 => 3,
            Fp8::E5M2 => 2,
        }
    }

    /// The bias of the exponent.
    pub const fn bias(self) -> u32 {
        match self {
            Fp8::E4M3 => 7,
            Fp8::E5M2 => 15,
        }
    }

    /// The largest number.
    pub const fn max(self) -> f32 {
        match self {
            Fp8::E4M3 => 448.0,
            Fp8::E5M2 => 57344.0,
        }
    }

    /// The code of the largest number.
    const fn max_code(self) -> u32 {
        match self {
            Fp8::E4M3 => 0x7e,
            Fp8::E5M2 => 0x7b,
        }
    }

    /// The smallest number that has all bits of mantissa: 2^-6, 2^-14.
    pub const fn least_normal(self) -> f32 {
        f32::from_bits((127 + 1 - self.bias()) << 23)
    }

    /// A power of two whose neighbours in f32 are as far apart as the numbers below
    /// [`Fp8::least_normal`]: adding it to one of those rounds it.
    pub const fn rounder(self) -> f32 {
        f32::from_bits((127 + 1 + 23 - self.bias() - self.mantissa_bits()) << 23)
    }

    /// The code nearest to `x`.
    pub fn encode(self, x: f32) -> u8 {
        let (bits, dropped) = (x.to_bits() & 0x7fff_ffff, 23 - self.mantissa_bits());
        if bits > 0x7f80_0000 {
            return 0x7f;
        }
        let code = if x.abs() < self.least_normal() {
            (x.abs() + self.rounder()).to_bits() - self.rounder().to_bits()
        } else {
            // Half of the last place, less where the tie goes down to even.
            let rounded = bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
            ((rounded >> dropped) - ((127 - self.bias()) << self.mantissa_bits())).min(self.max_code())
        };
        (code | x.to_bits() >> 31 << 7) as u8
    }

    /// The number of a code, exactly. E5M2 has infinities, which [`Fp8::encode`] never makes.
    pub fn decode(self, code: u8) -> f32 {
        let (code, m) = (u32::from(code), self.mantissa_bits());
        let (negative, magnitude) = (code & 0x80 != 0, code & 0x7f);
        let value = if magnitude > self.max_code() {
            if self == Fp8::E5M2 && magnitude == 0x7c { f32::INFINITY } else { f32::NAN }
        } else if magnitude >> m == 0 {
            // Units of the last place there.
            magnitude as f32 * (self.least_normal() / (1 << m) as f32)
        } else {
            f32::from_bits((magnitude + ((127 - self.bias()) << m)) << (23 - m))
        };
        if negative { -value } else { value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A code's number from the table of the paper.
    fn by_table(format: Fp8, code: u8) -> f64 {
        let (m, bias) = (format.mantissa_bits(), format.bias() as i32);
        let sign = if code < 0x80 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code & 0x7f) >> m, f64::from(code & ((1 << m) - 1)) / f64::from(1 << m));
        let last = 0x7f >> m;
        match (format, exponent) {
            (Fp8::E4M3, 15) if code & 7 == 7 => f64::NAN,
            (Fp8::E5M2, e) if e == last && mantissa == 0.0 => sign * f64::INFINITY,
            (Fp8::E5M2, e) if e == last => f64::NAN,
            (_, 0) => sign * mantissa * 2f64.powi(1 - bias),
            (_, e) => sign * (1.0 + mantissa) * 2f64.powi(e - bias),
        }
    }

    #[test]
    fn all_256_codes_are_those_of_the_table() {
        for format in Fp8::ALL {
            for code in 0..=255u8 {
                let (got, want) = (format.decode(code), by_table(format, code));
                assert!(
                    f64::from(got) == want || (got.is_nan() && want.is_nan()),
                    "{format:?} {code:#x}: {got} {want}"
                );
                assert!(got.is_nan() || got.is_sign_negative() == (code >= 0x80), "{format:?} {code:#x}");
                if got.is_finite() {
                    assert_eq!(format.encode(got), code, "{format:?}");
                }
            }
        }
        let most = |format: Fp8| (0..=255).map(|c| format.decode(c)).filter(|x| x.is_finite()).fold(0.0, f32::max);
        assert_eq!((most(Fp8::E4M3), most(Fp8::E5M2)), (448.0, 57344.0));
        // Table 1 of the paper: the smallest numbers above zero.
        assert_eq!((Fp8::E4M3.decode(1), Fp8::E5M2.decode(1)), (2f32.powi(-9), 2f32.powi(-16)));
        assert_eq!((Fp8::E4M3.decode(8), Fp8::E5M2.decode(4)), (2f32.powi(-6), 2f32.powi(-14)));
    }

    /// Between two neighbours: the nearer one, in the middle the even one, whichever neighbours and
    /// to the last bit of f32.
    #[test]
    fn numbers_between_two_codes_become_the_nearest_and_ties_the_even_one() {
        for format in Fp8::ALL {
            let largest = format.encode(format.max());
            for code in 0..largest {
                let (below, above) = (format.decode(code), format.decode(code + 1));
                let middle = (below + above) / 2.0;
                let even = if code % 2 == 0 { code } else { code + 1 };
                for (x, want) in [(middle.next_down(), code), (middle, even), (middle.next_up(), code + 1)] {
                    assert_eq!(format.encode(x), want, "{format:?} {x:e}");
                    assert_eq!(format.encode(-x), want | 0x80, "{format:?} -{x:e}");
                }
            }
            for x in [format.max() * 1.01, format.max() * 2.0, 1e30, f32::MAX, f32::INFINITY] {
                assert_eq!((format.encode(x), format.encode(-x)), (largest, largest | 0x80), "{format:?} {x}");
            }
            assert!(
                format.decode(format.encode(f32::NAN)).is_nan() && format.decode(format.encode(-f32::NAN)).is_nan()
            );
            assert_eq!((format.encode(1e-30), format.encode(-1e-30), format.encode(0.0)), (0, 0x80, 0));
        }
    }
}
