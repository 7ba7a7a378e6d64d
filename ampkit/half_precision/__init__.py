"""Models that are 16-bit themselves: conversion, the check of it, and float32 master weights."""
