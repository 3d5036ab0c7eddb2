"""What the chapters measure.ipynb and rungs.ipynb compute and print beside their text."""
