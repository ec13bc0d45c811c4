"""Pictures of packed batches: the figures, and pages of one file that draw them in a browser.

`figures` computes plain numbers and texts, which are also written as JSON. `page` puts them into a
page with the styles and scripts of this folder. The scripts draw: no chart is made in Python.
"""
