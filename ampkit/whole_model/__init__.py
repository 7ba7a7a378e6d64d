"""Whole-model precision: Apex's levels, master weights, half-precision inference."""
