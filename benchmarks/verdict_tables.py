"""Formulas, sets, symbols and words whose other writings are a matter of knowledge and not of a rule.

A reference stands at the beginning of a line; below it `==` other writings of it, and `!=` answers that are wrong. `@name` is a
number that is drawn anew for every case (`drawn_numbers` in `verdict_cases.py`).
"""

from __future__ import annotations

FORMULAS = r"""
@k\sin^2 x
    ==  @k-@k\cos^2 x
    ==  @k(\sin x)^2
    ==  @k\sin^{2}(x)
    !=  @k\cos^2 x
    !=  @k1\sin^2 x
\sin @k x\cos @k x
    ==  \frac{1}{2}\sin @kk x
    ==  \cos(@k x)\sin(@k x)
    !=  \sin @kk x
    !=  \frac{1}{2}\cos @kk x
\ln @pn
    ==  @n\ln @p
    ==  \log_e @pn
    ==  @n\log @p
    !=  @n1\ln @p
    !=  \ln @p
    !=  @n
\log_{@k} @kp
    ==  1+\log_{@k} @p
    ==  \frac{\ln @kp}{\ln @k}
    !=  \log_{@k} @p
    !=  \log_{@k1} @kp
@ke^{2x}
    ==  @k(e^x)^2
    ==  @k\exp(2x)
    ==  @ke^{x}\cdot e^{x}
    !=  @ke^{x}
    !=  @k1e^{2x}
    !=  @ke^{x^2}
e^{-@t}
    ==  \frac{1}{e^{@t}}
    ==  \exp(-@t)
    !=  0
    !=  e^{-@t1}
    !=  e^{@t}
@p^{@h}
    ==  @p \cdot @p^{@h1}
    ==  (@p^{@n})^{100}
    !=  @p^{@h}+1
    !=  @p^{@h1}
\frac{@k}{\sqrt{x}}
    ==  @kx^{-1/2}
    ==  \frac{@k\sqrt{x}}{x}
    !=  @k\sqrt{x}
    !=  \frac{@k1}{\sqrt{x}}
\sqrt[3]{@k}x
    ==  @k^{1/3}x
    ==  x\sqrt[3]{@k}
    !=  \sqrt{@k}x
    !=  \sqrt[3]{@k1}x
\binom{@m}{2}
    ==  @mc
    ==  \frac{@m!}{2!(@m-2)!}
    ==  \frac{@m(@m-1)}{2}
    !=  \binom{@m}{2}+1
    !=  \binom{@m}{3}
\frac{n!}{@k}
    ==  \frac{\Gamma(n+1)}{@k}
    ==  \frac{n(n-1)!}{@k}
    !=  \frac{(n+1)!}{@k}
    !=  \frac{n}{@k}
\frac{@k\pi}{@k1}
    ==  @k\pi/@k1
    ==  \frac{@k}{@k1}\pi
    !=  \frac{@k}{@k1}
    !=  \frac{@k1\pi}{@k}
|@k-x|
    ==  |x-@k|
    ==  \left|x-@k\right|
    !=  @k-x
    !=  |x+@k|
a^{@k}b^{@n}
    ==  b^{@n}a^{@k}
    ==  a^{@k} \cdot b^{@n}
    !=  a^{@k}b^{@n1}
    !=  a^{@k}+b^{@n}
"""

SETS_IN_WORDS = r"""
\mathbb{R}
    ==  \text{all real numbers}
    ==  (-\infty,\infty)
    ==  ℝ
    ==  x \in \mathbb{R}
    !=  \mathbb{Z}
    !=  \mathbb{Q}
    !=  \emptyset
    !=  (0,\infty)
\text{all real numbers}
    ==  \mathbb{R}
    ==  (-\infty,\infty)
    !=  \mathbb{Z}
    !=  \text{all integers}
    !=  \emptyset
(-\infty,\infty)
    ==  \mathbb{R}
    ==  \text{all real numbers}
    ==  (-\infty, +\infty)
    !=  (-\infty,0)
    !=  [0,\infty)
    !=  \mathbb{Z}
\emptyset
    ==  \varnothing
    ==  ∅
    ==  \text{no solution}
    !=  \mathbb{R}
    !=  \{0\}
    !=  |x| \ge 0
\mathbb{Z}
    ==  \text{all integers}
    ==  ℤ
    !=  \mathbb{R}
    !=  \mathbb{N}
    !=  \mathbb{Q}
"""

# What algebra does not work out: only the letters can tell.
SYMBOLS = r"""
\mathbb{Z}_{@k}
    ==  \mathbb{Z}_@k
    ==  \mathbb Z_{@k}
    !=  \mathbb{Z}_{@k1}
    !=  \mathbb{Z}
\aleph_{@k}
    ==  \aleph_@k
    !=  \aleph_{@k1}
\mathbb{R}^{@k}
    ==  \mathbb{R}^@k
    !=  \mathbb{R}^{@k1}
    !=  \mathbb{R}
A^{@k}B^\top
    ==  A^@k B^{\top}
    ==  A^{@k} B^T
    !=  A^{@k}B
    !=  A^{@k1}B^\top
\max\{@k,|z|\}
    ==  \max\left\{@k, |z|\right\}
    ==  \max(|z|, @k)
    !=  @k
    !=  |z|
    !=  \min\{@k,|z|\}
G/N_{@k} \cong H
    ==  G / N_@k \cong H
    !=  G/H \cong N_{@k}
    !=  G/N_{@k1} \cong H
\mathrm{GL}_{@k}(\mathbb{R})
    ==  GL_{@k}(\mathbb{R})
    ==  \mathrm{GL}_@k(\mathbb{R})
    !=  \mathrm{GL}_{@k1}(\mathbb{R})
    !=  \mathrm{SL}_{@k}(\mathbb{R})
\mathcal{F}_{@k}
    ==  \mathcal{F}_@k
    !=  \mathcal{F}_{@k1}
    !=  \mathcal{G}_{@k}
O(n^{@k} \log n)
    ==  O(n^@k\log n)
    ==  O\left(n^{@k} \log n\right)
    !=  O(n^{@k1} \log n)
    !=  O(n^{@k})
\Theta(n^{@k})
    ==  \Theta(n^@k)
    !=  \Theta(n^{@k1})
    !=  O(n^{@k})
\pi_{1}(S^{@k})
    ==  \pi_1(S^@k)
    !=  \pi_{1}(S^{@k1})
    !=  \pi_{2}(S^{@k})
L^{@k}(\mathbb{R})
    ==  L^@k(\mathbb{R})
    !=  L^{@k1}(\mathbb{R})
\mathbb{Z}/@k\mathbb{Z}
    ==  \mathbb{Z} / @k \mathbb{Z}
    !=  \mathbb{Z}/@k1\mathbb{Z}
\gcd(m^{@k},n)
    ==  \gcd(m^@k, n)
    ==  \gcd(n, m^{@k})
    !=  1
    !=  \gcd(m^{@k1},n)
\operatorname{Tr}(A^{@k})
    ==  \mathrm{Tr}(A^@k)
    !=  \operatorname{Tr}(A^{@k1})
    !=  A^{@k}
\lfloor @kx \rfloor
    ==  \left\lfloor @kx \right\rfloor
    !=  \lceil @kx \rceil
    !=  @kx
x \equiv @k \pmod{11}
    ==  x\equiv @k\pmod{11}
    !=  x \equiv @k1 \pmod{11}
    !=  x \equiv @k \pmod{13}
P(A_{@k} \mid B)
    ==  P(A_@k \mid B)
    !=  P(B \mid A_{@k})
    !=  P(A_{@k1} \mid B)
e^e+@k
    ==  @k+e^{e}
    ==  e^{e}+@k
    !=  e^2+@k
    !=  e^e+@k1
"""

WORDS = (
    "Monday", "Tuesday", "Friday", "even", "odd", "converges", "diverges", "increasing", "decreasing", "Alice", "Bernard",
    "hyperbola", "parabola", "ellipse", "circle", "yes", "no", "true", "false", "north", "east", "red", "green", "isosceles",
    "scalene", "undefined", "infinite",
)  # fmt: skip
